package claim

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// hold opens the device as the kernel's claim, and makes the checks that need it open.
func (t *Table) hold(ctx context.Context, r Request, dev *OpenedDevice, id identity) (wasReadOnly bool, err error) {
	held := t.open.get(id)
	if held != nil && held.mountable != r.Mountable {
		// One kind of handler needs the kernel to mount the device, the other to refuse that.
		return false, volume.Errorf(volume.InUse, "volume %s: its device %s (%s) belongs to a volume of another runtime handler, and only one of "+
			"the two has this node's kernel mount it: use one handler for both, or "+volume.TextWait,
			r.Target, r.Device.Path, r.Device)
	}
	if held == nil {
		if held, err = t.openHeld(ctx, r, dev); err != nil {
			return false, err
		}
		if err := t.open.add(id, held); err != nil {
			return false, errors.Join(t.open.release(id), err)
		}
	}
	return held.wasReadOnly, nil
}

func (t *Table) openHeld(ctx context.Context, r Request, dev *OpenedDevice) (*heldDevice, error) {
	fd, err := openClaim(ctx, r, dev)
	if errors.Is(err, unix.EBUSY) && t.open.keptFile(identityOf(dev.Device)) != nil {
		return nil, volume.Errorf(volume.InUse, "volume %s: the device %s (%s) is claimed for a volume whose record cannot be used: "+
			"`crustctl doctor` names it; "+volume.TextDelete, r.Target, dev.Path, dev.Device)
	}
	if err != nil {
		return nil, holdError(r.Volume, err)
	}
	wasReadOnly, err := checkHeld(r.Volume, fd)
	if err != nil {
		sys.CloseFD(fd)
		return nil, err
	}
	if dev.known { // the flag that was read now may be the one that we had set
		wasReadOnly = r.WasReadOnly
	}
	return &heldDevice{fd: fd, device: dev.Device, mountable: r.Mountable, wasReadOnly: wasReadOnly}, nil
}

// openClaim opens the device, and fails if somebody else has it. A mountable device is
// checked only at the first claim: later its own sandbox may have it mounted.
func openClaim(ctx context.Context, r Request, dev *OpenedDevice) (int, error) {
	if r.Mountable && dev.known {
		return dev.openBlock(0)
	}
	fd, err := openFree(ctx, momentTime, func() (int, error) { return dev.openBlock(unix.O_EXCL) })
	if err != nil || !r.Mountable {
		return fd, err
	}
	defer sys.CloseFD(fd)
	return dev.openBlock(0)
}

// momentTime bounds the wait for a process that has a device open only briefly: one that
// probes it, or one that is just being started and has copies of our descriptors. A
// refused caller tries again after half a second at best.
const momentTime = 500 * time.Millisecond

// openFree repeats an exclusive open while the device is busy, for at most patience.
func openFree(ctx context.Context, patience time.Duration, open func() (int, error)) (int, error) {
	for deadline := time.Now().Add(patience); ; {
		fd, err := open()
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) || !sys.Sleep(ctx, time.Millisecond) {
			return fd, err
		}
	}
}

func checkHeld(v *volume.Volume, fd int) (readOnly bool, err error) {
	size, err := unix.Seek(fd, 0, unix.SEEK_END)
	if err != nil {
		return false, err
	}
	if size == 0 {
		return false, volume.Errorf(volume.NotFound, "volume %s: the device %s (%s) is empty: has the driver attached it?",
			v.Target, v.Device.Path, v.Device)
	}
	flag, err := unix.IoctlGetInt(fd, unix.BLKROGET)
	if err != nil {
		return false, err
	}
	if flag != 0 && !v.ReadOnly {
		return false, volume.Errorf(volume.Invalid, "volume %s: the device %s (%s) is read-only: ask for a read-only volume",
			v.Target, v.Device.Path, v.Device)
	}
	return flag != 0, nil
}

func holdError(v *volume.Volume, err error) error {
	switch {
	case errors.Is(err, unix.EBUSY):
		return volume.Errorf(volume.InUse, "volume %s: the device %s (%s) is in use by this node's kernel: %s",
			v.Target, v.Device.Path, v.Device, whoHolds(v.Device))
	case errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENOMEDIUM):
		return volume.Errorf(volume.NotFound, "volume %s: there is nothing behind the device %s (%s): has the driver attached it? %w",
			v.Target, v.Device.Path, v.Device, err)
	default:
		return volume.Errorf(volume.Internal, "volume %s: the device %s (%s) cannot be claimed: %w", v.Target, v.Device.Path, v.Device, err)
	}
}

// whoHolds guesses, for a person, why an exclusive open failed.
func whoHolds(d volume.Device) string {
	number := DeviceNumber(d.Major, d.Minor)
	mounts, err := sys.Mounts(context.Background(), sys.MountTable, func(line string) bool { return sys.DeviceOfMount(line) == number })
	if err == nil && len(mounts) > 0 {
		var points []string
		for _, m := range mounts[:min(3, len(mounts))] {
			points = append(points, m.Mountpoint)
		}
		return "it is mounted at " + strings.Join(points, ", ") + "; unmount it"
	}
	holders, err := filepath.Glob("/sys/dev/block/" + number + "/holders/*")
	if err == nil && len(holders) > 0 {
		return "it is part of " + filepath.Base(holders[0])
	}
	return "it is mounted in another mount namespace, is swap, or another program holds it exclusively"
}

// Reclaim claims the device of a volume on record again, after a restart: with the
// keeper's descriptor if there is one, and otherwise by opening the device.
func (t *Table) Reclaim(ctx context.Context, r Request) error {
	id := identityOf(r.Device)
	if t.Has(r) {
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
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return deviceError(volume.NotFound, r.Target, r.Device.Path, "has gone", err)
	}
	if err != nil { // it may exist all the same
		return errors.Join(t.owners.reserve(r.Volume, id), deviceError(volume.Internal, r.Target, r.Device.Path, "cannot be opened", err))
	}
	dev := &OpenedDevice{Device: r.Device, fd: fd, known: true}
	defer dev.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || !deviceOf(&st).Same(r.Device) {
		return deviceError(volume.NotFound, r.Target, r.Device.Path, "is not "+r.Device.String()+" any more", err)
	}
	_, err = t.Acquire(ctx, r, dev, nil)
	return err
}

// adoptKept makes the keeper's descriptor the claim, if there is one.
func (t *Table) adoptKept(ctx context.Context, r Request, id identity) (adopted bool, err error) {
	unlock, err := t.lock(ctx, r.Volume, id)
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
	if err := unix.Fstat(fd, &st); err != nil || !deviceOf(&st).Same(r.Device) {
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
