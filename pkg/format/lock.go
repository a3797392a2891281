package format

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

const (
	lockWait  = 2 * time.Second
	pollEvery = 10 * time.Millisecond
)

// takeLock takes the lock of this device number. It belongs to an open file, not
// to a process: mkfs inherits it, so it ends with the last of us two. mkfs.btrfs
// tests O_EXCL and lets go of it again, so the device alone would not tell.
func (j *job) takeLock(ctx context.Context) error {
	file, err := os.OpenFile(j.f.lockFile, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return j.errorf(deferral.Internal, "cannot be locked: %w", err)
	}
	// One byte of the file stands for one device: nothing is ever left to tidy.
	place := int64(unix.Major(j.number))<<20 | int64(unix.Minor(j.number))
	until := time.Now().Add(lockWait)
	for {
		lock := unix.Flock_t{Type: unix.F_WRLCK, Whence: unix.SEEK_SET, Start: place, Len: 1}
		err := unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &lock)
		switch {
		case err == nil:
			j.lock = file
			return nil
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EINTR):
			closeFile(file)
			return j.errorf(deferral.Internal, "cannot be locked: %w", err)
		case time.Now().After(until):
			closeFile(file)
			return j.errorf(deferral.Busy, "is being looked at or formatted, maybe by an mkfs that this daemon started "+
				"before it was restarted: the volume is served when that has ended")
		}
		if err := pause(ctx); err != nil {
			closeFile(file)
			return j.gone(err)
		}
	}
}

func pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(pollEvery):
		return nil
	}
}
