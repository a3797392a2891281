package sys

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// Lock takes an exclusive lock on an open file or directory. If another process still has the
// lock after the time most, the error is EWOULDBLOCK.
func Lock(ctx context.Context, fd int, most time.Duration) error {
	for end := time.Now().Add(most); ; {
		err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
		if err == nil || !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || time.Now().After(end) {
			return err
		}
		if !Sleep(ctx, 2*time.Millisecond) {
			return ctx.Err()
		}
	}
}
