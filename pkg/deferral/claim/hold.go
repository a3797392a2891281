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
		return false, otherKind(r.Volume)
	}
	if held == nil {
		if held, err = t.openHeld(ctx, r, dev); err != nil {
			return false, err
		}
		if err := t.open.add(id, held); err != nil {
			sys.CloseFD(held.fd)
			return false, err
		}
	}
	return held.wasReadOnly, nil
}

// otherKind refuses read-only volumes of one device by two kinds of handler: what
// one needs the kernel to refuse, the other needs it to do.
func otherKind(v *volume.Volume) error {
	return volume.Errorf(volume.InUse, "volume %s: its device %s (%s) belongs to a volume of another runtime handler, and only one of "+
		"the two has this node's kernel mount it: use one handler for both, or "+volume.TextWait,
		v.Target, v.Device.Path, v.Device)
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
	return &heldDevice{fd: fd, device: dev.Device, mountable: r.Mountable, wasReadOnly: wasReadOnly}, nil
}

// openClaim opens the device, and fails if somebody else has it. A mountable device is
// checked only at the first claim: later its own sandbox may have it mounted.
func openClaim(ctx context.Context, r Request, dev *OpenedDevice) (int, error) {
	if r.Mountable && dev.known {
		return dev.openBlock(0)
	}
	fd, err := openAlone(ctx, dev)
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

// openAlone opens the device exclusively.
func openAlone(ctx context.Context, dev *OpenedDevice) (int, error) {
	for deadline := time.Now().Add(momentTime); ; {
		fd, err := dev.openBlock(unix.O_EXCL)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return fd, err
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
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
	if points := mountPoints(number); len(points) > 0 {
		return "it is mounted at " + strings.Join(points[:min(3, len(points))], ", ") + "; unmount it"
	}
	holders, err := filepath.Glob("/sys/dev/block/" + number + "/holders/*")
	if err == nil && len(holders) > 0 {
		return "it is part of " + filepath.Base(holders[0])
	}
	return "it is mounted in another mount namespace, is swap, or another program holds it exclusively"
}

// mountPoints lists where this namespace has a device mounted, for error texts.
func mountPoints(number string) []string {
	mounts, err := sys.Mounts(context.Background(), func(n string) bool { return n == number })
	if err != nil {
		return nil
	}
	points := make([]string, 0, len(mounts))
	for _, m := range mounts {
		points = append(points, m.Point)
	}
	return points
}
