package format

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// heldWait is how long somebody may have the device for a moment, such as another
// program that looks at it.
const heldWait = 500 * time.Millisecond

// open opens the device anew, by its descriptor.
func (j *job) open(flags int) (*os.File, error) {
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", j.device.Fd()), flags|unix.O_CLOEXEC, 0)
	if err == nil {
		return os.NewFile(uintptr(fd), j.path), nil
	}
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, j.errorf(unmet, "is mounted, or held by another program or device of this node (see findmnt, "+
			"lsblk and /sys/dev/block/%d:%d/holders): %w", unix.Major(j.number), unix.Minor(j.number), err)
	case errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENOMEDIUM):
		return nil, j.errorf(deferral.NotFound, "is no longer there: has the driver attached it? %w", err)
	case errors.Is(err, unix.EROFS):
		return nil, j.errorf(unmet, "is write-protected: %w", err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return nil, j.errorf(deferral.Internal, "cannot be opened: is its node on a nodev mount, or the device "+
			"not allowed to this service? %w", err)
	default:
		return nil, j.errorf(deferral.Internal, "cannot be opened: %w", err)
	}
}

// openAlone opens the device so that nobody else can mount or hold it meanwhile.
// Past the page cache: what counts is what the device has.
func (j *job) openAlone(ctx context.Context, mode int) (*os.File, error) {
	until := time.Now().Add(heldWait)
	for {
		file, err := j.open(mode | unix.O_EXCL | unix.O_DIRECT)
		if err == nil || !errors.Is(err, unix.EBUSY) {
			return file, err
		}
		if j.readOnly && mode == unix.O_RDONLY {
			// Nothing will be written, and read-only owners share a device.
			return j.open(mode | unix.O_DIRECT)
		}
		if time.Now().After(until) {
			return nil, err
		}
		if err := pause(ctx); err != nil {
			return nil, j.gone(err)
		}
	}
}

// closeAlone lets go of the device. A program that is just being started has a
// copy of every descriptor for a moment, and would keep the device from the mkfs
// that is to come; under this lock there is hardly one.
func closeAlone(file *os.File) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	closeFile(file)
}
