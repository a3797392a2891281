package deferral

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// openByIdentity opens a device by its recorded name if it is still that device.
func openByIdentity(d Device, flags int) (int, error) {
	fd, err := unix.Open(d.Path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC|flags, 0)
	if err != nil {
		return noFD, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || !d.is(&st) {
		closeFD(fd)
		return noFD, errors.Join(err, fmt.Errorf("%s is not %s any more", d.Path, d))
	}
	return fd, nil
}

// reclaim takes up, after a restart, the claim of a volume on record: from a
// kept descriptor where there is one, else by opening the device again.
func (c *claims) reclaim(ctx context.Context, rec *record, kept map[string]*os.File) error {
	id := rec.Device.identity()
	c.mu.Lock()
	done := slices.Contains(c.byKey[rec.Key], id)
	c.mu.Unlock()
	if done {
		return nil
	}
	if rec.Device.Kind == BlockDevice && !rec.HostMounts {
		if file := kept[claimName(id)]; file != nil {
			return c.adoptKept(rec, id, file)
		}
	}
	fd, err := unix.Open(rec.Device.Path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return deviceError(NotFound, rec.Target, rec.Device.Path, "has gone", err)
	}
	dev := &openedDevice{Device: rec.Device, fd: fd, known: true}
	defer dev.close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || !rec.Device.is(&st) {
		return deviceError(NotFound, rec.Target, rec.Device.Path, "is not "+rec.Device.String()+" any more", err)
	}
	_, err = c.acquire(ctx, rec, dev, nil)
	if err == nil {
		c.restoreOwnState(rec, id)
	}
	return err
}

// restoreOwnState puts the recorded state of the device over the one that was
// read just now, which may be the one that we had set.
func (c *claims) restoreOwnState(rec *record, id identity) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if held := c.held[id]; held != nil && rec.ReadOnly {
		held.wasReadOnly = rec.DeviceWasReadOnly
	}
}

// adoptKept takes a descriptor from the keeper as the claim.
func (c *claims) adoptKept(rec *record, id identity, file *os.File) error {
	if err := c.reserve(&rec.Volume, id); err != nil {
		return err
	}
	c.mu.Lock()
	held := c.held[id]
	c.mu.Unlock()
	if held == nil {
		fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return Errorf(Internal, "volume %s: the kept claim of %s cannot be used: %w", rec.Target, rec.Device.Path, err)
		}
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil || !rec.Device.is(&st) {
			closeFD(fd)
			return Errorf(Internal, "volume %s: the kept claim is not of %s", rec.Target, rec.Device)
		}
		held = &heldDevice{fd: fd, device: rec.Device, wasReadOnly: rec.DeviceWasReadOnly}
		c.mu.Lock()
		c.held[id] = held
		c.mu.Unlock()
	}
	return c.holdBacking(&rec.Volume, held.fd, rec.Device.Major)
}

// closeAll closes the descriptors; kept copies stay with the keeper.
func (c *claims) closeAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, held := range c.held {
		closeFD(held.fd)
		delete(c.held, id)
	}
}
