package sys

import (
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// CloseAlone closes the descriptor of a device so that no program which this process starts shares it. Such a
// program has a copy of every descriptor until it runs, and would keep the device busy: one that was started
// right before may do so for a moment longer. As CloseFD it ignores the error of close.
func CloseAlone(fd int) {
	if fd >= 0 {
		closeAlone(fd, func() error { return unix.Close(fd) })
	}
}

// CloseFileAlone is CloseAlone for a file.
func CloseFileAlone(file *os.File) { closeAlone(int(file.Fd()), file.Close) } // nil is closed already

// closeAlone calls closeFD while no program is being started: the fork lock excludes that. To close the last
// descriptor of a device writes what is cached of it, and can take for ever. With the lock held, no program could be
// started any more, and no device closed. So a mapping keeps the file open meanwhile, which a child that is being
// started shares, but does not copy: closeFD is not the last close, and the kernel never waits in it. What can
// wait is to give up the mapping, after the lock.
//
// An image is closed without the lock: its close asks the server of its filesystem even if it is not the last one. So
// is what cannot be mapped, because it is open for writing only or a mere path. A program may then keep it open for a
// moment.
func closeAlone(fd int, closeFD func() error) {
	const length = 1 // of which nobody reads a byte
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		if kept, err := unix.MmapPtr(fd, 0, nil, length, unix.PROT_NONE, unix.MAP_PRIVATE); err == nil {
			defer func() { _ = unix.MunmapPtr(kept, length) }() // without the lock
			if lockFork() {
				defer syscall.ForkLock.RUnlock()
			}
		}
	}
	_ = closeFD()
}

// startTime bounds the wait for programs that are being started. One has the lock until it is read, for ever if its
// storage hangs, and keeps its copies anyhow. With RLock, which lets nobody pass, no other could be started either.
var startTime = 2 * time.Second

// startHangs is set once startTime has passed, so that later calls wait for little more than a start that does not hang.
var startHangs atomic.Bool

func lockFork() bool {
	patience := startTime
	if startHangs.Load() {
		patience = 100 * time.Millisecond
	}
	for begin := time.Now(); !syscall.ForkLock.TryRLock(); time.Sleep(100 * time.Microsecond) {
		if time.Since(begin) > patience {
			startHangs.Store(true)
			return false
		}
	}
	startHangs.Store(false)
	return true
}
