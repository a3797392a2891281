// Package rig is what system tests, the demonstration and the benchmarks stand on: a private mount namespace, loop
// devices that go away whatever happens, a look for leaks, and processes, among them a daemon of its own.
package rig

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// Main runs the tests of a package in a mount namespace of their own, so that whatever a killed test leaves mounted
// goes with it, and then looks for loop devices and mounts that were left.
func Main(m interface{ Run() int }) int { return Run(m.Run, 0) }

// Run does what Main does around tests that need more than a mount namespace:
// other namespaces, or something that is there for all of them; and around a program
// that is no test.
func Run(tests func() int, namespaces uintptr) int {
	code, err := run(tests, namespaces)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// before is what was there when the tests began: loop devices, and mounts by their numbers, because another
// program may rename the directory of a mount meanwhile.
var before map[string]string

func run(tests func() int, namespaces uintptr) (int, error) {
	if os.Geteuid() != 0 {
		return 1, errors.New("mounts and loop devices need root: run it as root, or with sudo")
	}
	if mark() == "" {
		return 0, enterNamespaces(unix.CLONE_NEWNS | namespaces)
	}
	if err := MakeMountsPrivate(); err != nil {
		return 1, err
	}
	clearEarlier()
	removeTemp, err := ownTemp()
	if err != nil {
		return 1, fmt.Errorf("make a directory for temporary files: %w", err)
	}
	before = leakable()
	code := tests()
	removeTemp()
	for _, left := range Leaks() {
		fmt.Fprintln(os.Stderr, "LEAKED:", left)
		code = 1
	}
	return code, nil
}

// Leaks gives what is there and was not when the tests began. The kernel frees a loop device only when its last opener,
// which may be a probe of udev's, has closed it: a little patience tells that from a leak.
func Leaks() []string {
	return check.Left(30*time.Second, 100*time.Millisecond, func() []string {
		now := leakable()
		maps.DeleteFunc(now, func(one, _ string) bool { return before[one] != "" })
		return slices.Sorted(maps.Values(now))
	})
}

// enterNamespaces runs the program again, in a process group that only this process
// sends signals to: it decides itself what an interruption ends, and cleans up.
func enterNamespaces(which uintptr) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, os.Interrupt, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT)
	cmd := exec.Command(self, os.Args[1:]...) //nolint:gosec // ourselves
	cmd.Env = append(os.Environ(), insideEnv+"="+newMark())
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: which, Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() {
		for s := range signals {
			_ = cmd.Process.Signal(s) // it may have ended by itself
		}
	}()
	return cmd.Wait()
}

// leakable lists what a test could leave behind. Loop devices are the machine's:
// those of others who test at the same time are told by the names of their files.
func leakable() map[string]string {
	out := make(map[string]string)
	for device, file := range Loops(mark()) {
		out[device+file] = "loop device " + device + " over " + file
	}
	for _, m := range Mounts("/") {
		out[strconv.Itoa(m.ID)] = "mount " + m.Mountpoint
	}
	return out
}

// Need fails the test, or outside CI skips it, where a program is missing.
func Need(t T, programs ...string) {
	t.Helper()
	for _, program := range programs {
		if _, err := exec.LookPath(program); err != nil {
			Missing(t, program+" is not installed")
		}
	}
}

// Missing says that a part is missing: a failure in CI, a skip elsewhere.
func Missing(t T, what string) {
	t.Helper()
	check.Needs(t, false, what)
}

// Tmpfs gives a directory on a tmpfs of its own. Options are tmpfs mount options, such as "size=1m".
func Tmpfs(t T, options string) string {
	t.Helper()
	dir := t.TempDir()
	err := unix.Mount("tmpfs", dir, "tmpfs", 0, options)
	check.Require(t, err == nil, "mount tmpfs: %v", err)
	t.Cleanup(func() { UnmountAll(t, dir) })
	return dir
}

// UnmountAll unmounts everything at and below a directory.
func UnmountAll(t T, dir string) {
	t.Helper()
	err := Unmount(dir)
	check.That(t, err == nil, "%v", err)
}

// Soak reports whether the long forms of tests shall run, as `make soak` has it.
func Soak() bool { return os.Getenv("CRUST_SOAK") == "1" }

// RaceTime is how long a loop looks for a race.
func RaceTime() time.Duration {
	if Soak() {
		return 30 * time.Second
	}
	return 2 * time.Second
}

// Sample gives all cases in a soak, and otherwise every nth one.
func Sample[T any](all []T, n int) (some []T) {
	for i, one := range all {
		if Soak() || i%n == 0 {
			some = append(some, one)
		}
	}
	return some
}

// Seed returns the seed of random steps, and logs it: CRUST_SEED repeats a run.
func Seed(t T) uint64 {
	t.Helper()
	seed, err := strconv.ParseUint(os.Getenv("CRUST_SEED"), 10, 64)
	if err != nil {
		seed = uint64(time.Now().UnixNano()) //nolint:gosec // any number will do
	}
	t.Logf("CRUST_SEED=%d", seed)
	return seed
}

// Image makes a sparse file.
func Image(t T, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	check.Must(t, os.WriteFile(path, nil, 0o600))
	check.Must(t, os.Truncate(path, size))
	return path
}

// Loop attaches a loop device over a file for the time of the test.
func Loop(t T, backing string, opts loopdev.Options) string {
	t.Helper()
	path := check.Value(loopdev.Attach(backing, opts))(t)
	generation := generationOf(path)
	if generation == "" {
		check.Must(t, loopdev.Detach(path))
		Missing(t, "the kernel's diskseq")
	}
	t.Cleanup(func() {
		// The test may have detached it, and then it may be somebody else's by now.
		check.Must(t, DetachIf(path, func(*os.File) bool { return generationOf(path) == generation }))
	})
	return path
}

// Disk makes a loop device with a filesystem on it; fs may be empty.
func Disk(t T, size int64, fs string) string {
	t.Helper()
	image := Image(t, size)
	if fs != "" {
		Mkfs(t, fs, image)
	}
	return Loop(t, image, loopdev.Options{})
}

// Command runs a program that must succeed, and gives what it wrote.
func Command(t T, name string, args ...string) string {
	t.Helper()
	Need(t, name)
	return check.Run(t, exec.Command(name, args...)) //nolint:gosec // a test's own words
}

// Mkfs makes a filesystem on an image or a device.
func Mkfs(t T, fs, on string, options ...string) {
	t.Helper()
	Command(t, "mkfs."+fs, append(append([]string{"-q"}, options...), on)...)
}

// Fsck has the filesystem's own checker look at an image or a device that nobody has.
func Fsck(t T, fs, on string) {
	t.Helper()
	check := map[string][]string{"ext4": {"e2fsck", "-fn"}, "xfs": {"xfs_repair", "-n"}, "btrfs": {"btrfs", "check", "--readonly"}}[fs]
	Command(t, check[0], append(check[1:], on)...)
}

// RecordErrors writes errors into the superblock of an ext4 that nobody has mounted.
func RecordErrors(t T, device string) {
	t.Helper()
	for _, value := range []string{"error_count 2", "first_error_time 20260102030405", "last_error_func ext4_find_entry"} {
		Command(t, "debugfs", "-w", "-R", "set_super_value "+value, device)
	}
}

// MayGrow tells whether the kernel lets this process grow a mounted filesystem: ext4 asks
// for CAP_SYS_RESOURCE, which not every container that runs tests has.
func MayGrow(t T, fs string) bool {
	t.Helper()
	if fs != "ext4" {
		return true
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	check.Must(t, unix.Capget(&header, &data[0]))
	return data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}

// FDs lists the open descriptors of a process, to be compared.
func FDs(t T, pid int) []string {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries := check.Value(os.ReadDir(dir))(t)
	var out []string
	for _, entry := range entries {
		if link, err := os.Readlink(filepath.Join(dir, entry.Name())); err == nil {
			out = append(out, link)
		}
	}
	slices.Sort(out)
	return out
}
