//go:build system

// Package rig is what system tests stand on: a private mount namespace with
// a tmpfs, loop devices that go away whatever happens, and a look for leaks.
package rig

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
)

// Main runs the tests of a package in a mount namespace of their own, so that
// whatever a killed test leaves mounted goes with it, and then looks for loop
// devices and mounts that were left.
func Main(m *testing.M) int { return Run(m.Run, 0) }

// Run does what Main does around tests that need more than a mount namespace:
// other namespaces, or something that is there for all of them.
func Run(tests func() int, namespaces uintptr) int {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "system tests need root: run them as root, or with sudo")
		return 1
	}
	if mark() == "" {
		return enterNamespaces(unix.CLONE_NEWNS | namespaces)
	}
	if err := MakeMountsPrivate(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	removeTemp, err := ownTemp()
	if err != nil {
		fmt.Fprintln(os.Stderr, "make a directory for temporary files:", err)
		return 1
	}
	before := leakable()
	code := tests()
	removeBuilt()
	removeTemp()
	for _, left := range leaks(before) {
		fmt.Fprintln(os.Stderr, "LEAKED:", left)
		code = 1
	}
	return code
}

// leaks gives what is there and was not before. The kernel frees a loop device
// only when its last opener, which may be a probe of udev's, has closed it: a
// little patience tells that from a leak.
func leaks(before []string) []string {
	for patience := 30; ; patience-- {
		left := slices.DeleteFunc(leakable(), func(one string) bool { return slices.Contains(before, one) })
		if len(left) == 0 || patience == 0 {
			return left
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func enterNamespaces(which uintptr) int {
	self, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideEnv+"="+newMark())
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: which, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// leakable lists what a test could leave behind. Loop devices are the machine's:
// those of others who test at the same time are told by the names of their files.
func leakable() []string {
	var out []string
	for device, file := range Loops(mark()) {
		out = append(out, "loop device "+device+" over "+file)
	}
	for _, point := range MountPoints("/") {
		out = append(out, "mount "+point)
	}
	return out
}

// Need fails the test, or outside CI skips it, where a program is missing.
func Need(t testing.TB, programs ...string) {
	t.Helper()
	for _, program := range programs {
		if _, err := exec.LookPath(program); err != nil {
			Missing(t, program+" is not installed")
		}
	}
}

// Missing says that a part is missing: a failure in CI, a skip elsewhere.
func Missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal(what)
	}
	t.Skip(what)
}

// Tmpfs gives a directory on a tmpfs of its own. Options are tmpfs mount
// options, such as "size=1m".
func Tmpfs(t testing.TB, options string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		t.Fatal("mount tmpfs:", err)
	}
	t.Cleanup(func() { UnmountAll(t, dir) })
	return dir
}

// UnmountAll unmounts everything at and below a directory.
func UnmountAll(t testing.TB, dir string) {
	t.Helper()
	if err := Unmount(dir); err != nil {
		t.Error(err)
	}
}

// Image makes a sparse file.
func Image(t testing.TB, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
	return path
}

// Loop attaches a loop device over a file for the time of the test.
func Loop(t testing.TB, backing string, opts loopdev.Options) string {
	t.Helper()
	path, err := loopdev.Attach(backing, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := loopdev.Detach(path); err != nil {
			t.Error(err)
		}
	})
	return path
}

// Disk makes a loop device with a filesystem on it; fs may be empty.
func Disk(t testing.TB, size int64, fs string) string {
	t.Helper()
	image := Image(t, size)
	if fs != "" {
		Need(t, "mkfs."+fs)
		if out, err := exec.Command("mkfs."+fs, "-q", image).CombinedOutput(); err != nil {
			t.Fatalf("mkfs.%s: %v\n%s", fs, err, out)
		}
	}
	return Loop(t, image, loopdev.Options{})
}

// FDs lists the open descriptors of a process, to be compared.
func FDs(t testing.TB, pid int) []string {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, entry := range entries {
		if link, err := os.Readlink(filepath.Join(dir, entry.Name())); err == nil {
			out = append(out, link)
		}
	}
	slices.Sort(out)
	return out
}
