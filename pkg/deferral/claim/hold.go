package claim

import (
	"context"
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Claim claims the device of the first volume in the kernel, and proves that it is free. A device on
// record is not proven to be free: its sandbox may have it.
func (p *Pending) Claim(ctx context.Context) error {
	switch {
	case !p.First, p.dev.known && p.dev.Kind != volume.BlockDevice:
		return nil
	case p.dev.Kind != volume.BlockDevice:
		return p.claimImage(ctx)
	}
	held, err := p.table.openHeld(ctx, p.request, p.dev)
	p.dev.closeLoop()
	if err != nil {
		return err
	}
	p.held = held
	if p.dev.known {
		return nil
	}
	return p.proveFree(ctx, openers.Query{FD: held.fd, Own: 1, Claimed: !held.mountable, Stack: p.stack})
}

// claimImage proves that nobody writes to an image. It cannot be claimed in the kernel.
func (p *Pending) claimImage(ctx context.Context) error {
	v := p.request.Volume
	if v.ReadOnly {
		return volume.Errorf(volume.Unsupported, "volume %s: read-only cannot be enforced for the image file %s: "+
			"attach it with `losetup --read-only` and hand over the loop device", v.Target, v.Device.Path)
	}
	fd, err := unix.Open(sys.ProcFD(p.dev.FD), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return unprovenError(v, err)
	}
	defer sys.CloseFD(fd)
	return p.proveFree(ctx, openers.Query{FD: fd})
}

// proveFree fails unless nobody else has the device open. That the kernel has it is another error: no
// VM is to be ended.
func (p *Pending) proveFree(ctx context.Context, q openers.Query) error {
	v := p.request.Volume
	q.Expected = p.table.owners.expectedLoops(v)
	users, err := p.table.askOthers(ctx, v, q, momentTime)
	if err == nil && users.Kernel {
		return inUseError(v, users.Names)
	}
	return p.table.users.refuse(p.request, users, err)
}

// checkShared refuses a device that a volume of another kind of handler has: one kind needs the
// kernel to mount the device, the other to refuse that.
func (t *Table) checkShared(r Request, id identity) error {
	if held := t.open.get(id); held == nil || held.mountable == r.Mountable {
		return nil
	}
	return volume.Errorf(volume.InUse, "volume %s: its device %s (%s) belongs to a volume of another runtime handler, and only one of "+
		"the two has this node's kernel mount it: use one handler for both, or wait until that volume is released",
		r.Target, r.Device.Path, r.Device)
}

func (t *Table) openHeld(ctx context.Context, r Request, dev *OpenedDevice) (*heldDevice, error) {
	fd, err := openClaim(ctx, r, dev)
	if errors.Is(err, unix.EBUSY) && t.open.keptFile(identityOf(dev.Device)) != nil {
		return nil, volume.Errorf(volume.InUse, "volume %s: the device %s (%s) is claimed for %w: "+
			"`crustctl doctor` names it", r.Target, dev.Path, dev.Device, ErrLost)
	}
	if errors.Is(err, unix.EBUSY) {
		return nil, t.busyError(ctx, r, dev)
	}
	if err != nil {
		return nil, holdError(r.Volume, err)
	}
	wasReadOnly, err := checkHeld(r.Volume, fd)
	if dev.known { // the flag may be the one that we had set, or by now that of an error
		wasReadOnly = r.WasReadOnly
	} else if err == nil && wasReadOnly && !r.ReadOnly {
		err = volume.Errorf(volume.Invalid, "volume %s: the device %s (%s) is read-only: ask for a read-only volume", r.Target, dev.Path, dev.Device)
	}
	if err != nil {
		sys.CloseAlone(fd)
		return nil, err
	}
	return &heldDevice{fd: fd, device: dev.Device, mountable: r.Mountable, wasReadOnly: wasReadOnly}, nil
}

// busyError names who has a device that cannot be claimed: a process that claims it, or the kernel.
func (t *Table) busyError(ctx context.Context, r Request, dev *OpenedDevice) error {
	fd, err := dev.openBlock(0)
	if err != nil {
		return holdError(r.Volume, err)
	}
	defer sys.CloseAlone(fd)
	dev.closeLoop()
	users, err := t.askOthers(ctx, r.Volume, openers.Query{FD: fd, Own: 1, Claimed: true}, 0)
	if err == nil && users.Names != "" && !users.Kernel {
		return t.users.refuse(r, users, nil)
	}
	return holdError(r.Volume, unix.EBUSY)
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
	defer sys.CloseAlone(fd)
	return dev.openBlock(0)
}

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
	return flag != 0, err
}

func inUseError(v *volume.Volume, by string) error {
	return volume.Errorf(volume.InUse, "volume %s: the device %s (%s) is in use by %s", v.Target, v.Device.Path, v.Device, by)
}

func holdError(v *volume.Volume, err error) error {
	switch {
	case errors.Is(err, unix.EBUSY):
		return inUseError(v, openers.KernelUsers(identityOf(v.Device)))
	case isGone(v.Device, err):
		return volume.Errorf(volume.NotFound, "volume %s: there is nothing behind the device %s (%s): has the driver attached it? %w",
			v.Target, v.Device.Path, v.Device, err)
	default:
		return volume.Errorf(volume.Internal, "volume %s: the device %s (%s) cannot be claimed: %w", v.Target, v.Device.Path, v.Device, err)
	}
}

// Expect makes a volume on record the owner of its device until Reclaim has claimed that again, which may hang.
// Nobody else gets the device meanwhile. It owns nothing of another device that has the number now.
func (t *Table) Expect(r Request) {
	if r.Device.Kind != "" && !r.IsReplaced() {
		t.owners.expect(r.Volume)
	}
}

// Reclaim claims the device of a volume on record again, after a restart: with the
// keeper's descriptor if there is one, and otherwise by opening the device.
func (t *Table) Reclaim(ctx context.Context, r Request) error {
	if t.Has(r) {
		return nil
	}
	t.Expect(r)
	err := t.reclaim(ctx, r)
	gone := errors.Is(err, ErrReplaced) || volume.KindOf(err) == volume.NotFound && t.open.get(identityOf(r.Device)) == nil
	if err == nil || gone {
		t.owners.confirm(r.Key, err == nil)
	}
	return err
}

func (t *Table) reclaim(ctx context.Context, r Request) error {
	if r.IsReplaced() { // before anything of it is adopted: that is of the other device
		return volume.Errorf(volume.NotFound, "volume %s: its device %s (%s) is not there: %w", r.Target, r.Device.Path, r.Device, ErrReplaced)
	}
	id := identityOf(r.Device)
	if r.Device.Kind == volume.BlockDevice && !r.Mountable {
		if adopted, err := t.adoptKept(ctx, r, id); adopted || err != nil {
			return err
		}
	}
	if r.Device.Kind == "" {
		return volume.Errorf(volume.Internal, "volume %s: its device is not known", r.Target)
	}
	fd, err := openByIdentity(r.Device, unix.O_PATH)
	if err != nil {
		kind := volume.Internal // it may exist all the same
		if isGone(r.Device, err) {
			kind = volume.NotFound
		}
		return deviceError(kind, r.Target, r.Device.Path, "cannot be opened", err)
	}
	dev := &OpenedDevice{Device: r.Device, FD: fd, known: true}
	defer dev.Close()
	pending, err := t.Begin(ctx, r, dev)
	if err != nil {
		return err
	}
	_, err = pending.Keep()
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
	if held := t.open.get(id); file == nil && held != nil && slices.Contains(t.owners.owned(r.Key), id) {
		// An earlier call has adopted it, and what lies under it was not known.
		if err := t.checkShared(r, id); err != nil {
			return false, err
		}
		_, err := t.owners.reserveBacking(r.Volume, held.fd, id)
		return true, err
	}
	if file == nil {
		return false, nil
	}
	fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return false, volume.Errorf(volume.Internal, "volume %s: the kept claim of %s cannot be used: %w", r.Target, r.Device.Path, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || openers.FileOf(&st) != id {
		sys.CloseFD(fd)
		return false, volume.Errorf(volume.Internal, "volume %s: the kept claim is not of %s", r.Target, r.Device)
	}
	if err := t.owners.reserve(r.Volume, id); err != nil {
		sys.CloseFD(fd)
		return false, err
	}
	t.open.adopt(id, &heldDevice{fd: fd, device: r.Device, wasReadOnly: r.WasReadOnly})
	_, err = t.owners.reserveBacking(r.Volume, fd, id)
	return true, err
}
