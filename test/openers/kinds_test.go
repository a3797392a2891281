//go:build system

package openers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// subject is what a finder is asked about.
type subject struct {
	fd int
	// path is what the others open: the same device, or the image under it.
	path string
}

// opener has a subject open in another way than the test itself.
type opener struct {
	kind string
	of   func(t *testing.T) subject
	// open returns the name that the count gives the opener, and what ends it.
	open func(t *testing.T, s subject) (name string, end func())
	// count and scan are set if these methods see it.
	count, scan bool
}

const theKernel = "the kernel itself"

// openersOfEachKind has in its last column what the comment of package scan says: to what it is blind.
var openersOfEachKind = []opener{
	{"a descriptor that writes", device, redirected("<>"), true, true},
	{"a descriptor that reads", device, redirected("<"), true, true},
	{"a process in other namespaces", device, fromOtherNamespaces, true, true},
	{"a thread with descriptors of its own", device, inAThread, true, false},
	{"a mapping without a descriptor", device, unnamed("mapping"), true, false},
	{"a descriptor that is being passed", device, unnamed("passing"), true, false},
	{"a fixed file of io_uring", device, unnamed("ring"), true, false},
	{"a mount", device, mount, true, true},
	{"a mount of btrfs", mixedBtrfs, mount, true, true},
	{"a mount in another namespace", device, mountElsewhere, true, true},
	{"a loop device", device, loop(loopdev.Options{}), true, true},
	{"a loop device that reads", device, loop(loopdev.Options{ReadOnly: true}), true, true},
	{"a loop device that nobody has open", device, unused, false, false},
	{"a descriptor of the name alone", device, byName, false, false},
	{"a copy of our own descriptor", device, copied, false, false},
	{"a child with a copy of our descriptor", device, inherited, false, true},

	{"a writer of the image", loopOverImage, redirected("<>"), true, true},
	{"a reader of the image", loopOverImage, redirected("<"), false, false},
	{"another loop device over the image", loopOverImage, loop(loopdev.Options{}), true, true},
	{"another one that nobody has open", loopOverImage, unused, false, false},
	{"one over the image that reads", loopOverImage, loop(loopdev.Options{ReadOnly: true}), false, true},
	{"a writer of the image under two loop devices", loopOverLoop, redirected("<>"), true, true},
	{"a reader of the image under two loop devices", loopOverLoop, redirected("<"), false, false},
	{"a writer of an image file", image, redirected("<>"), true, true},
	{"a reader of an image file", image, redirected("<"), false, false},
	{"a loop device over an image file", image, loop(loopdev.Options{}), true, true},
}

// TestEveryKindOfOpener has each kind of opener beside the test's own, and no opener after its end.
func TestEveryKindOfOpener(t *testing.T) {
	count, scan := counting(t), scanning()
	for _, one := range openersOfEachKind {
		t.Run(one.kind, func(t *testing.T) {
			s := one.of(t)
			q, claimed := openers.Query{FD: s.fd, Own: 1}, openers.Query{FD: s.fd, Own: 1, Claimed: true}
			wantUsers(t, count, q, "")
			name, end := one.open(t, s)
			wantUsers(t, count, q, show.When(one.count, name))
			wantUsers(t, scan, q, show.When(one.scan, name))
			// O_EXCL shows mounts. Who has claimed the device does not ask for them.
			wantUsers(t, scan, claimed, show.When(one.scan && !strings.HasPrefix(one.kind, "a mount"), name))
			end()
			wantUsers(t, count, q, "")
			wantUsers(t, scan, q, "")
		})
	}
}

// TestProcessesOutsideTheContainer are not named in one without the node's processes, nor is the kernel blamed for them,
// unless it has the device mounted.
func TestProcessesOutsideTheContainer(t *testing.T) {
	path, dir := device(t).path, t.TempDir() // the test has it open
	for _, mounted := range []string{"", "mounted"} {
		if mounted != "" {
			check.Must(t, unix.Mount(path, dir, "ext4", 0, ""))
			defer func() { check.NoError(t, unix.Unmount(dir, 0), "unmount") }()
		}
		cmd := inRole("container", path)
		cmd.Env, cmd.SysProcAttr = append(cmd.Env, "MOUNTED="+mounted), &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
		check.Must(t, cmd.Run())
	}
}

// TestLoopDeviceThatIsExpected counts although nobody has it open, over this very image alone.
func TestLoopDeviceThatIsExpected(t *testing.T) {
	for _, f := range []*openers.Finder{counting(t), scanning()} {
		s := loopOverImage(t)
		q := openers.Query{FD: s.fd, Own: 1}
		used := rig.Loop(t, s.path, loopdev.Options{})
		for over, want := range map[string]string{used: used, rig.Disk(t, 16*mib, ""): ""} {
			var st unix.Stat_t
			check.Must(t, unix.Stat(over, &st))
			q.Expected = []openers.File{{Block: true, Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev)}}
			wantUsers(t, f, q, want)
		}
	}
}

func names(got, want string) bool {
	return strings.Contains(got, want) && (got == "") == (want == "")
}

func processName(h *rig.Holder, program string) string {
	return fmt.Sprintf("process %d (%q)", h.Process.Pid, program)
}

// What is asked about.

func device(t *testing.T) subject {
	t.Helper()
	disk := rig.Disk(t, 16*mib, "ext4")
	return subject{open(t, disk), disk}
}

// mixedBtrfs is small.
func mixedBtrfs(t *testing.T) subject {
	t.Helper()
	image := rig.Image(t, 32*mib)
	rig.Mkfs(t, "btrfs", image, "--mixed")
	disk := rig.Loop(t, image, loopdev.Options{})
	return subject{open(t, disk), disk}
}

func loopOverImage(t *testing.T) subject {
	t.Helper()
	image := rig.Image(t, 16*mib)
	return subject{open(t, rig.Loop(t, image, loopdev.Options{})), image}
}

func loopOverLoop(t *testing.T) subject {
	t.Helper()
	image := rig.Image(t, 16*mib)
	lower := rig.Loop(t, image, loopdev.Options{})
	return subject{open(t, rig.Loop(t, lower, loopdev.Options{})), image}
}

func image(t *testing.T) subject {
	t.Helper()
	path := rig.Image(t, 16*mib)
	return subject{open(t, path), path}
}

// Who has it open.

func redirected(how string) func(*testing.T, subject) (string, func()) {
	return func(t *testing.T, s subject) (string, func()) {
		h := rig.HoldBy(t, opening(t, "cat", how, s.path))
		return processName(h, "cat"), h.End
	}
}

func fromOtherNamespaces(t *testing.T, s subject) (string, func()) {
	cmd := opening(t, "cat", "<>", s.path)
	asRoot := []syscall.SysProcIDMap{{Size: 1}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUSER, UidMappings: asRoot, GidMappings: asRoot,
	}
	h := rig.HoldBy(t, cmd)
	return processName(h, "cat"), h.End
}

func inAThread(t *testing.T, s subject) (string, func()) {
	h := rig.HoldBy(t, inRole("thread", s.path))
	return processName(h, "openers.test"), h.End
}

// unnamed is an opener of which only the count knows.
func unnamed(role string) func(*testing.T, subject) (string, func()) {
	return func(t *testing.T, s subject) (string, func()) {
		return theKernel, rig.HoldBy(t, inRole(role, s.path)).End
	}
}

func mount(t *testing.T, s subject) (string, func()) {
	point := t.TempDir()
	rig.Command(t, "mount", s.path, point)
	t.Cleanup(func() { _ = unix.Unmount(point, unix.MNT_DETACH) })
	return "mounted at " + point, func() { check.Must(t, unix.Unmount(point, 0)) }
}

func mountElsewhere(t *testing.T, s subject) (string, func()) {
	cmd := exec.Command("sh", "-c", `mount "$0" "$1" && echo mounted && exec cat`, s.path, t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	return theKernel, rig.HoldBy(t, cmd).End
}

func loop(opts loopdev.Options) func(*testing.T, subject) (string, func()) {
	return func(t *testing.T, s subject) (string, func()) {
		over, end := idle(t, s, opts)
		user := rig.Hold(t, "<", over)
		return over, func() { user.End(); end() }
	}
}

// unused is a loop device that nobody has open.
func unused(t *testing.T, s subject) (string, func()) {
	_, end := idle(t, s, loopdev.Options{})
	return "", end
}

func idle(t *testing.T, s subject, opts loopdev.Options) (string, func()) {
	over := rig.Loop(t, s.path, opts)
	return over, func() { check.Must(t, loopdev.Detach(over)) }
}

func byName(t *testing.T, s subject) (string, func()) {
	return "", rig.HoldBy(t, inRole("name", s.path)).End
}

func copied(t *testing.T, s subject) (string, func()) {
	fd := check.Value(unix.FcntlInt(uintptr(s.fd), unix.F_DUPFD_CLOEXEC, 3))(t)
	return "", func() { check.Must(t, unix.Close(fd)) }
}

func inherited(t *testing.T, s subject) (string, func()) {
	fd := check.Value(unix.FcntlInt(uintptr(s.fd), unix.F_DUPFD_CLOEXEC, 3))(t)
	file := os.NewFile(uintptr(fd), s.path)
	defer func() { check.Must(t, file.Close()) }()
	cmd := opening(t, "cat", "<", "/dev/null")
	cmd.ExtraFiles = []*os.File{nil, file}
	h := rig.HoldBy(t, cmd)
	return processName(h, "cat"), h.End
}

// roles are what this program does as another process.
var roles = map[string]func(argument string) error{
	"name": opens(unix.O_PATH, func(int) error { return nil }),
	"mapping": opens(unix.O_RDWR, func(fd int) error {
		_, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
		return errors.Join(err, unix.Close(fd))
	}),
	"passing": opens(unix.O_RDWR, func(fd int) error {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET, 0)
		if err != nil {
			return err
		}
		return errors.Join(unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(fd), nil, 0), unix.Close(fd))
	}),
	"container": opens(unix.O_RDONLY, func(fd int) error {
		f, q := openers.New(), openers.Query{FD: fd, Own: 1}
		users, err := f.Await(context.Background(), q, 0)
		if holders, unseen := f.Holders(context.Background(), q); err != nil || users.Kernel != (os.Getenv("MOUNTED") != "") || !errors.Is(unseen, openers.ErrOtherNumbers) {
			return fmt.Errorf("users are %+v, %w, and holders %v, %w", users, err, holders, unseen)
		}
		return nil
	}),
	"ring": opens(unix.O_RDWR, func(fd int) error { return errors.Join(registerWithRing(fd), unix.Close(fd)) }),
	"thread": func(path string) error {
		opened := make(chan error)
		go openInThread(path, opened)
		return errors.Join(<-opened, untilEnd())
	},
	"pod":  holdPod,
	"many": holdMany,
	"scan": printScan,
}

// opens makes the role of one who opens a file, does something with the descriptor, and stays.
func opens(flags int, and func(fd int) error) func(string) error {
	return func(path string) error {
		fd, err := unix.Open(path, flags, 0)
		if err != nil {
			return err
		}
		if err := and(fd); err != nil {
			return err
		}
		return untilEnd()
	}
}

// openInThread opens a file in a thread with a descriptor table of its own, and keeps that. It is not
// the first thread of the process, whose table is seen as that of the process.
func openInThread(path string, opened chan<- error) {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		go openInThread(path, opened)
		select {}
	}
	opened <- errors.Join(unix.Unshare(unix.CLONE_FILES), check.Err(unix.Open(path, unix.O_RDWR, 0)))
	select {}
}

// registerWithRing makes a file a fixed one of a ring, which stays open until the process ends.
func registerWithRing(fd int) error {
	const registerFiles = 2 // IORING_REGISTER_FILES of the kernel's <linux/io_uring.h>
	var params [120]byte    // struct io_uring_params
	ring, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
	if errno != 0 {
		return fmt.Errorf("make a ring (does the sysctl kernel.io_uring_disabled forbid it?): %w", errno)
	}
	files := [1]int32{int32(fd)} //nolint:gosec // a descriptor
	if _, _, errno = unix.Syscall6(unix.SYS_IO_URING_REGISTER, ring, registerFiles, uintptr(unsafe.Pointer(&files)), 1, 0, 0); errno != 0 {
		return fmt.Errorf("register a file with a ring: %w", errno)
	}
	return nil
}

// TestServersOfDevices is about programs that have a device open because they are the device.
func TestServersOfDevices(t *testing.T) {
	server := filepath.Join(t.TempDir(), "rbd-nbd")
	check.Must(t, os.WriteFile(server, check.Value(os.ReadFile("/bin/cat"))(t), 0o700)) //nolint:gosec // a program
	f, s := counting(t), device(t)
	q := openers.Query{FD: s.fd, Own: 1, Servers: []string{"nbd-client", "rbd-nbd"}}
	start := func(program string) *rig.Holder { return rig.HoldBy(t, opening(t, program, "<>", s.path)) }

	first := start(server)
	wantUsers(t, f, q, "")
	wantUsers(t, f, openers.Query{FD: s.fd, Own: 1}, processName(first, "rbd-nbd"))
	second := start(server)
	wantUsers(t, f, q, "")

	// They are not passed over beside another program, or beside an opener that cannot be named.
	other := start("cat")
	wantUsers(t, f, q, processName(other, "cat"))
	other.End()
	wantUsers(t, f, q, "")
	mapping := rig.HoldBy(t, inRole("mapping", s.path))
	users := check.Value(f.Await(t.Context(), q, 0))(t)
	check.That(t, names(users.Names, theKernel), "beside a mapping: %+v", users)
	mapping.End()
	first.End()
	second.End()
	wantUsers(t, f, openers.Query{FD: s.fd, Own: 1}, "")

	// A child that inherited the server's open file is another program.
	family := rig.HoldBy(t, exec.Command("sh", "-c", `exec 3<>"$0" 4<&0; cat <&4 >/dev/null & echo open; exec "$1"`, s.path, server))
	wantUsers(t, f, q, processName(family, "rbd-nbd"))
	family.End()
	wantUsers(t, f, q, "")

	// A script's name is not that of its program.
	script := filepath.Join(t.TempDir(), "rbd-nbd")
	check.Must(t, os.WriteFile(script, []byte("#!/bin/sh\necho open; read line\n"), 0o700)) //nolint:gosec // a program
	liar := rig.HoldBy(t, exec.Command("sh", "-c", `exec 3<>"$0"; exec "$1"`, s.path, script))
	wantUsers(t, f, q, "process ")
	liar.End()
	wantUsers(t, f, q, "")
}
