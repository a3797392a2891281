//go:build system

package broker

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// roleEnv makes the test binary play another process: a role and its argument.
const roleEnv = "CRUST_TEST_ROLE"

// roles are what a shell's redirection cannot do.
var roles = map[string]func(arg string) error{
	"name": openName, "mapping": mapDevice, "passed": passDevice, "thread": openInThread, "ring": openInRing,
	"flap": flapShared, "flap exclusively": flapExclusive,
	"many": openMany, "shared table": shareTable, "shut down": shutDown,
}

// play does what a role does, and holds it until its input ends.
func play(role string) int {
	name, arg, _ := strings.Cut(role, ":")
	if err := roles[name](arg); err != nil {
		fmt.Fprintln(os.Stderr, role, err)
		return 1
	}
	fmt.Println("open")
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}

// inRole prepares a process with a role.
func inRole(name, arg string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe") // another user cannot reach it by its path
	cmd.Env, cmd.Stderr = append(os.Environ(), roleEnv+"="+name+":"+arg), os.Stderr
	return cmd
}

func openDisk(path string, flags int) (int, error) { return unix.Open(path, flags|unix.O_CLOEXEC, 0) }

// openName opens only the name of a device, which nobody can read or write by.
func openName(path string) error {
	_, err := openDisk(path, unix.O_PATH)
	return err
}

// mapDevice maps a device and closes its descriptor.
func mapDevice(path string) error {
	fd, err := openDisk(path, unix.O_RDWR)
	if err != nil {
		return err
	}
	_, err = unix.Mmap(fd, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return errors.Join(err, unix.Close(fd))
}

// passDevice sends a descriptor, which nobody receives, and closes it.
func passDevice(path string) error {
	fd, err := openDisk(path, unix.O_RDWR)
	if err != nil {
		return err
	}
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return errors.Join(unix.Sendmsg(ends[0], []byte{0}, unix.UnixRights(fd), nil, 0), unix.Close(fd))
}

// openInThread opens a device in a thread whose table of descriptors no other thread has.
func openInThread(path string) error {
	opened := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_FILES)
		if err == nil {
			_, err = openDisk(path, unix.O_RDWR)
		}
		opened <- err
		select {}
	}()
	return <-opened
}

// openInRing registers a descriptor with io_uring and closes it.
func openInRing(path string) error {
	ring, err := newRing()
	if err != nil {
		return err
	}
	fd, err := openDisk(path, unix.O_RDWR)
	if err != nil {
		return err
	}
	const registerFiles = 2 // IORING_REGISTER_FILES of the kernel's <linux/io_uring.h>
	files := []int32{int32(fd)}
	if _, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, ring, registerFiles, uintptr(unsafe.Pointer(&files[0])), 1, 0, 0); errno != 0 {
		return errno
	}
	return unix.Close(fd)
}

func newRing() (uintptr, error) {
	var params [120]byte // struct io_uring_params
	ring, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
	if errno != 0 {
		return 0, os.NewSyscallError("io_uring_setup", errno)
	}
	return ring, nil
}

func needRings(t *testing.T) {
	t.Helper()
	ring, err := newRing()
	if err != nil {
		rig.Missing(t, err.Error())
	}
	_ = unix.Close(int(ring))
}

// openMany has many descriptors, as a virtiofsd whose guest walks through a tree.
func openMany(many string) error {
	n, _ := strconv.Atoi(many)
	null, err := openDisk("/dev/null", unix.O_RDONLY)
	for i := 1; i < n && err == nil; i++ {
		_, err = unix.Dup(null)
	}
	return err
}

// mostDescriptors is how many a process of this test can have, beside some of its own.
func mostDescriptors(t *testing.T, want int) int {
	t.Helper()
	var limit unix.Rlimit
	check.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	return min(want, int(limit.Max)-100)
}

// shareTable has 50 processes with one table of many descriptors.
func shareTable(many string) error {
	if err := openMany(many); err != nil {
		return err
	}
	runtime.LockOSThread() // whose end is that of its children
	for range 50 {
		pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, unix.CLONE_FILES|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
		if errno != 0 {
			return errno
		}
		for pid == 0 { // in the child: only raw system calls
			_, _, _ = unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0)
			_, _, _ = unix.RawSyscall(unix.SYS_PAUSE, 0, 0, 0)
		}
	}
	return nil
}

// shutDown opens a file and has its xfs give up, as that does after a failure of its disk.
func shutDown(path string) error {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	const goingDown, noLogFlush = 0x8004587d, 2 // XFS_IOC_GOINGDOWN
	return unix.IoctlSetPointerInt(fd, goingDown, noLogFlush)
}

// span is a time of the kernel's monotonic clock, which all processes share.
type span struct{ from, to int64 }

func now() int64 {
	var at unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &at) // it cannot fail
	return at.Nano()
}

func flapShared(path string) error    { return flap(path, 0) }
func flapExclusive(path string) error { return flap(path, unix.O_EXCL) }

// flap opens and closes a device until its input ends, and writes when it had it open for certain.
func flap(path string, flags int) error {
	ended := make(chan struct{})
	go func() { defer close(ended); _, _ = io.Copy(io.Discard, os.Stdin) }()
	for {
		select {
		case <-ended:
			return nil
		default:
		}
		fd, err := openDisk(path, unix.O_RDONLY|flags)
		if err == nil {
			had := span{from: now()}
			moment(30 * time.Millisecond)
			had.to = now()
			_ = unix.Close(fd)
			fmt.Println(had.from, had.to)
		} else if !errors.Is(err, unix.EBUSY) {
			return err
		}
		moment(10 * time.Millisecond)
	}
}

// moment is a short time, often none.
func moment(most time.Duration) {
	if rand.IntN(3) > 0 {
		time.Sleep(rand.N(most))
	}
}

// flapper is a process that opens and closes a device.
type flapper struct {
	end func()

	mu  sync.Mutex
	had []span
}

func startFlapper(t *testing.T, role, disk string) *flapper {
	t.Helper()
	cmd := inRole(role, disk)
	stdin, err := cmd.StdinPipe()
	check.Must(t, err)
	stdout, err := cmd.StdoutPipe()
	check.Must(t, err)
	check.Must(t, cmd.Start())
	f, told := &flapper{}, make(chan struct{})
	go func() {
		defer close(told)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			var had span
			if _, err := fmt.Sscan(lines.Text(), &had.from, &had.to); err != nil {
				return // its last line
			}
			f.mu.Lock()
			f.had = append(f.had, had)
			f.mu.Unlock()
		}
	}()
	f.end = sync.OnceFunc(func() {
		_ = stdin.Close()
		<-told
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(f.end)
	return f
}

// spans are when it had the device open, as far as it told by now. After its end, they are all.
func (f *flapper) spans() []span {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.had)
}
