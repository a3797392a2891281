package deferral

import (
	"errors"
	"slices"

	"golang.org/x/sys/unix"
)

// setReadOnly makes the kernel refuse every write to the device, by whomever.
func (c *claims) setReadOnly(v *Volume) error {
	if v.Device.Kind != BlockDevice || !v.ReadOnly {
		return nil
	}
	c.mu.Lock()
	held := c.held[v.Device.identity()]
	c.mu.Unlock()
	if held == nil {
		return Errorf(Internal, "volume %s: the device %s is not held", v.Target, v.Device.Path)
	}
	// A device that is read-only of itself is left as it is: the flag that we
	// would set outlives the attachment of, say, a loop device.
	if already, err := unix.IoctlGetInt(held.fd, unix.BLKROGET); err == nil && already != 0 {
		return nil
	}
	if err := unix.IoctlSetPointerInt(held.fd, unix.BLKROSET, 1); err != nil {
		return Errorf(Internal, "volume %s: the device %s cannot be made read-only: %w", v.Target, v.Device.Path, err)
	}
	return nil
}

// putBack restores the device's own read-only state when the volume is its last
// owner. The claim still stands meanwhile.
func (c *claims) putBack(rec *record) error {
	if rec.Device.Kind != BlockDevice || !rec.ReadOnly || rec.DeviceWasReadOnly {
		return nil
	}
	id := rec.Device.identity()
	c.mu.Lock()
	held, owners := c.held[id], c.owners[id]
	c.mu.Unlock()
	if slices.ContainsFunc(owners, func(o owner) bool { return o.key != rec.Key }) {
		return nil
	}
	if held != nil {
		return makeWritable(rec, held.fd)
	}
	fd, err := openByIdentity(rec.Device, 0)
	if err != nil {
		return nil //nolint:nilerr // a device that has gone has no state to put back
	}
	defer closeFD(fd)
	return makeWritable(rec, fd)
}

func makeWritable(rec *record, fd int) error {
	if err := unix.IoctlSetPointerInt(fd, unix.BLKROSET, 0); err != nil && !errors.Is(err, unix.ENXIO) && !errors.Is(err, unix.ENODEV) {
		return Errorf(Internal, "volume %s: the device %s cannot be made writable again: %w", rec.Target, rec.Device.Path, err)
	}
	return nil
}
