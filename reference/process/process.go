// Package process distinguishes a process from a later one with the same PID.
package process

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Process identifies a process: the kernel reuses PIDs, but never with the same start time.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // in clock ticks since the boot
}

// ErrEnded says that the process has ended. A zombie has ended, too.
var ErrEnded = errors.New("the process has ended")

// Of returns the process that has a PID now.
func Of(pid int) (Process, error) {
	dir, start, err := open(pid)
	if err == nil {
		err = unix.Close(dir)
	}
	return Process{PID: pid, Start: start}, err
}

// Open opens the process's directory in /proc. The descriptor always refers to this process:
// after its end, nothing in it can be opened, even if the PID is reused.
func (p Process) Open() (dir int, err error) {
	if p.PID <= 0 {
		return -1, ErrEnded
	}
	dir, start, err := open(p.PID)
	if err == nil && start != p.Start {
		_ = unix.Close(dir)
		err = ErrEnded
	}
	if err != nil {
		return -1, err
	}
	return dir, nil
}

// Lives reports whether the process certainly lives.
func (p Process) Lives() bool { return p.look() == nil }

// Ended reports whether the process has certainly ended. If it cannot be examined, as when no
// file can be opened, both Lives and Ended are false.
func (p Process) Ended() bool { return errors.Is(p.look(), ErrEnded) }

func (p Process) look() error {
	dir, err := p.Open()
	if err == nil {
		_ = unix.Close(dir)
	}
	return err
}

// Inside runs f in the mount namespace of the process, in a thread that ends afterwards: a thread in another namespace
// must not run anything else. Its umask is 0, so that a new directory has its final mode at once, also if this program is
// killed.
func (p Process) Inside(f func() error) error {
	dir, err := p.Open()
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(dir) }()
	ns, err := unix.Openat(dir, "ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) {
		return ErrEnded
	}
	if err != nil {
		return fmt.Errorf("the mount namespace of process %d cannot be opened: %w", p.PID, err)
	}
	defer func() { _ = unix.Close(ns) }()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := enter(ns); err != nil {
			done <- fmt.Errorf("the mount namespace of process %d cannot be entered: %w", p.PID, err)
			return
		}
		done <- f()
	}()
	return <-done
}

// enter moves this thread, which gets a root and an umask of its own, into a mount namespace.
func enter(ns int) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	unix.Umask(0)
	return unix.Setns(ns, unix.CLONE_NEWNS)
}

// open opens the directory of the process that has a PID now, and returns its start time.
func open(pid int) (dir int, start uint64, err error) {
	dir, err = unix.Open("/proc/"+strconv.Itoa(pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		if start, err = startOf(dir); err != nil {
			_ = unix.Close(dir)
		}
	}
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) {
		err = ErrEnded
	}
	return dir, start, err
}

// startOf reads the start time of a process. Its name can contain anything, so the fields are
// counted from the last parenthesis.
func startOf(dir int) (uint64, error) {
	fd, err := unix.Openat(dir, "stat", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer func() { _ = unix.Close(fd) }()
	var buf [1024]byte // the kernel returns all of it at once
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return 0, err
	}
	text := string(buf[:n])
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	const state, start = 0, 19
	if len(fields) <= start {
		return 0, fmt.Errorf("the kernel's word on the process cannot be read: %q", text)
	}
	if fields[state] == "Z" || fields[state] == "X" {
		return 0, ErrEnded
	}
	return strconv.ParseUint(fields[start], 10, 64)
}

// CloseInherited closes the descriptors above last that this process inherited by accident, such as a pipe whose reader
// waits for its end. A process that outlives the one that started it calls this first. They are the ones without
// close-on-exec, which a Go program sets on all of its own.
func CloseInherited(last int) {
	dir, err := os.Open("/proc/self/fd")
	if err != nil {
		return
	}
	defer func() { _ = dir.Close() }()
	names, _ := dir.Readdirnames(-1)
	for _, name := range names {
		fd, err := strconv.Atoi(name)
		if err != nil || fd <= last {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			_ = unix.Close(fd)
		}
	}
}
