// Package process tells a process from a later one with the same number.
package process

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Process is one process: the kernel gives its number again, but never with its start.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // in clock ticks since the boot
}

// ErrEnded is a process that has ended. One that nobody has waited for yet has, too.
var ErrEnded = errors.New("the process has ended")

// Of is the process that has a number now.
func Of(pid int) (Process, error) {
	dir, start, err := open(pid)
	if err == nil {
		err = unix.Close(dir)
	}
	return Process{PID: pid, Start: start}, err
}

// Open opens the kernel's directory of the process. It is of this process for ever: when
// the number is given again, nothing can be opened in it any more.
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

// Lives tells whether the process is certainly there: what has its number is this one.
func (p Process) Lives() bool { return p.look() == nil }

// Ended tells whether the process has certainly ended. Of one that cannot be examined, as
// where no file can be opened, neither is certain.
func (p Process) Ended() bool { return errors.Is(p.look(), ErrEnded) }

func (p Process) look() error {
	dir, err := p.Open()
	if err == nil {
		_ = unix.Close(dir)
	}
	return err
}

// open opens the directory of the process that has a number now, and tells its start.
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

// startOf reads when a process was started. Its name can hold anything, so the fields are
// counted from the last parenthesis.
func startOf(dir int) (uint64, error) {
	fd, err := unix.Openat(dir, "stat", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer func() { _ = unix.Close(fd) }()
	var buf [1024]byte // the kernel gives all of it at once
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
