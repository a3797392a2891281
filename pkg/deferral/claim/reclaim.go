package claim

import (
	"context"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Reclaim claims the device of a volume on record again, after a restart: with the
// keeper's descriptor if there is one, and otherwise by opening the device.
func (t *Table) Reclaim(ctx context.Context, r Request) error {
	id := identityOf(r.Device)
	if slices.Contains(t.owners.owned(r.Key), id) {
		return nil
	}
	if r.Device.Kind == volume.BlockDevice && !r.Mountable {
		if adopted, err := t.adoptKept(ctx, r, id); adopted || err != nil {
			return err
		}
	}
	if r.Device.Kind == "" {
		return volume.Errorf(volume.Internal, "volume %s: its device is not known", r.Target)
	}
	fd, err := unix.Open(r.Device.Path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return deviceError(volume.NotFound, r.Target, r.Device.Path, "has gone", err)
	}
	dev := &OpenedDevice{Device: r.Device, fd: fd, known: true}
	defer dev.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || !isDevice(r.Device, &st) {
		return deviceError(volume.NotFound, r.Target, r.Device.Path, "is not "+r.Device.String()+" any more", err)
	}
	_, err = t.Acquire(ctx, r, dev, nil)
	if err == nil && r.ReadOnly {
		// The flag that was read now may be the one that we had set.
		t.open.setWasReadOnly(id, r.WasReadOnly)
	}
	return err
}

// adoptKept makes the keeper's descriptor the claim, if there is one.
func (t *Table) adoptKept(ctx context.Context, r Request, id identity) (adopted bool, err error) {
	unlock, err := t.lock(ctx, id)
	if err != nil {
		return false, err
	}
	defer unlock()
	file := t.open.keptFile(id)
	if file == nil {
		return false, nil
	}
	fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return false, volume.Errorf(volume.Internal, "volume %s: the kept claim of %s cannot be used: %w", r.Target, r.Device.Path, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || !isDevice(r.Device, &st) {
		sys.CloseFD(fd)
		return false, volume.Errorf(volume.Internal, "volume %s: the kept claim is not of %s", r.Target, r.Device)
	}
	if err := t.owners.reserve(r.Volume, id); err != nil {
		sys.CloseFD(fd)
		return false, err
	}
	if err := t.open.adopt(id, &heldDevice{fd: fd, device: r.Device, wasReadOnly: r.WasReadOnly}); err != nil {
		return true, err
	}
	return true, t.owners.reserveBacking(r.Volume, fd, r.Device.Major)
}
