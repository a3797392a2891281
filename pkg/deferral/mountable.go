package deferral

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// unmountTime bounds the wait for the mounts of a sandbox that has just ended:
// the kernel takes a mount namespace apart after its last process has gone.
const unmountTime = 2 * time.Second

// waitUnmounted waits until the kernel has no mount of the device any more, where
// its mounts are a sandbox's. What the driver would do next to a device that is
// still mounted costs data.
func (c *claims) waitUnmounted(ctx context.Context, rec *record) error {
	if !rec.HostMounts || rec.Device.Kind != BlockDevice || c.isShared(rec) {
		return nil
	}
	deadline := time.NewTimer(unmountTime)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		fd, err := openByIdentity(rec.Device, unix.O_EXCL)
		if closeFD(fd); !errors.Is(err, unix.EBUSY) {
			return nil //nolint:nilerr // a device that has gone is mounted nowhere
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return stillMounted(rec, ctx.Err())
		case <-deadline.C:
			return stillMounted(rec, err)
		}
	}
}

// isShared tells whether other read-only volumes are on the device, whose
// sandboxes may well have it mounted.
func (c *claims) isShared(rec *record) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.owners[rec.Device.identity()]) > 1
}

func stillMounted(rec *record, err error) error {
	return Errorf(Busy, "volume %s: no sandbox of it is known to live, and yet its device %s (%s) is in use: %s: "+
		"repeat when that has ended: %w", rec.Target, rec.Device.Path, rec.Device, whoHolds(rec.Device), err)
}
