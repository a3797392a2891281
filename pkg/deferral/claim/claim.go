// Package claim decides who owns a device. A device has one read-write owner, or
// several read-only ones, and a claim ends only when it is proven that no process of
// the node has the device open any more.
package claim

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim/internal/holders"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Request is a volume whose device is to be claimed or released.
type Request struct {
	*volume.Volume
	// Mountable is set if this node's kernel mounts the device for the sandbox. The
	// claim is then a plain descriptor, and that mount keeps others out.
	Mountable bool
	// WasReadOnly is the device's read-only flag before the first read-only volume set
	// it, as it is on record.
	WasReadOnly bool
}

// Table is the table of claims. An owner is entered under what its device is, so that
// neither a second name nor a second loop device over the same image leads to a second
// read-write owner. The device is also held open with O_EXCL, so that the kernel refuses
// every mount of it in every mount namespace (but see Request.Mountable).
type Table struct {
	users   *Users
	devices sys.KeyLocks[identity] // one call at a time claims or releases a device
	owners  *owners
	open    *descriptors
}

// NewTable makes a table. The keeper, which may be nil, keeps claims over a restart;
// kept are the descriptors that it gave back, by name.
func NewTable(keeper Keeper, kept map[string]*os.File, users *Users) *Table {
	return &Table{
		users:  users,
		owners: &owners{byID: make(map[identity][]owner), byKey: make(map[volume.Key][]identity)},
		open:   &descriptors{keeper: keeper, held: make(map[identity]*heldDevice), kept: byClaim(kept)},
	}
}

func (t *Table) lock(ctx context.Context, v *volume.Volume, id identity) (unlock func(), err error) {
	unlock, err = t.devices.Lock(ctx, id)
	if err != nil {
		return nil, volume.Errorf(volume.ContextKind(err), "volume %s: another operation on its device %s is still under way: %w", v.Target, v.Device, err)
	}
	return unlock, nil
}

// Acquire claims the device for the volume, or returns an error that names who has it:
// another volume, the kernel, or, for a device that is not on record yet, a process. It
// reports the read-only flag that the device had by itself.
//
// For the first owner of a device, Acquire calls prepare, which may be nil, while nobody
// else can claim the device.
//
// If Acquire fails, the volume owns nothing, with one exception: a volume on record stays
// the owner in this table unless its device has gone. A sandbox may have the device.
func (t *Table) Acquire(
	ctx context.Context, r Request, dev *OpenedDevice, prepare func(context.Context) error,
) (wasReadOnly bool, err error) {
	id := identityOf(dev.Device)
	unlock, err := t.lock(ctx, r.Volume, id)
	if err != nil {
		return false, err
	}
	defer unlock()
	if err := t.owners.reserve(r.Volume, id); err != nil {
		return false, err
	}
	held, err := t.isHeld(id)
	var foreign []loopDevice
	if err == nil {
		foreign, err = t.owners.reserveData(r.Volume, dev, held)
	}
	if err == nil {
		err = t.refuseUsers(ctx, r.Volume, !dev.known && !held, foreign)
	}
	if err == nil && prepare != nil && !held {
		err = prepare(ctx)
	}
	switch {
	case err != nil:
	case dev.Kind == volume.BlockDevice:
		wasReadOnly, err = t.hold(ctx, r, dev, id)
	case !dev.known:
		err = checkImage(r.Volume, dev)
	}
	if err != nil && (!dev.known || volume.KindOf(err) == volume.NotFound) {
		err = errors.Join(t.drop(r.Key, id), err) // an error of drop comes first: it is one to retry
	}
	return wasReadOnly, err
}

// refuseUsers refuses a device that a process uses: one that may be in use, or one of the loop
// devices over it.
func (t *Table) refuseUsers(ctx context.Context, v *volume.Volume, mayBeInUse bool, foreign []loopDevice) error {
	if mayBeInUse {
		if err := t.users.refuse(ctx, v, momentTime); err != nil {
			return err
		}
	}
	return t.users.refuseLoops(ctx, v, foreign)
}

// isHeld reports whether the device is held for an owner other than the one that claims it. A
// descriptor that an earlier release failed to close has no owner: it is closed first.
func (t *Table) isHeld(id identity) (bool, error) {
	if len(t.owners.ofDevice(id)) == 1 {
		return false, t.open.release(id)
	}
	return t.open.get(id) != nil, nil
}

// Release ends the volume's claim. It first calls leave, which may be nil, with whether the
// volume is the last owner of the device; meanwhile no other volume claims or releases it. If
// leave fails, the claim stays. For the last owner, Release restores the device's own
// read-only flag.
func (t *Table) Release(r Request, leave func(last bool) error) error {
	id := identityOf(r.Device)
	// No context: a release that has begun must not stop here.
	unlock, err := t.lock(context.Background(), r.Volume, id)
	if err != nil {
		return err
	}
	defer unlock()
	last := !slices.ContainsFunc(t.owners.ofDevice(id), func(o owner) bool { return o.key != r.Key })
	if leave != nil {
		err = leave(last)
	}
	if err == nil && last {
		err = t.restoreFlag(r, id)
	}
	if err != nil {
		return err
	}
	failpoint.Hit("unstage-put-back")
	return t.drop(r.Key, id)
}

// drop removes the owner and, if it was the last one, closes the kernel's claim. The
// caller has the device's lock.
func (t *Table) drop(key volume.Key, primary identity) error {
	t.owners.remove(key)
	if len(t.owners.ofDevice(primary)) > 0 {
		return nil
	}
	return t.open.release(primary)
}

// Has reports whether the volume has its whole claim: it owns the device, and a block device
// is held open.
func (t *Table) Has(r Request) bool {
	id := identityOf(r.Device)
	return slices.Contains(t.owners.owned(r.Key), id) && (!id.Block || t.open.get(id) != nil)
}

// IsShared reports whether the device has other owners, which are then all read-only.
func (t *Table) IsShared(d volume.Device) bool { return len(t.owners.ofDevice(identityOf(d))) > 1 }

// Kept counts the claims that the keeper holds over a restart.
func (t *Table) Kept() int { return t.open.count() }

// DropKept closes the kept descriptors that no volume needs. It leaves those of the wanted
// devices, whose volumes may claim them later, and those of devices that a process has open,
// which a lost volume may have had. It also retries what an earlier release failed to close.
func (t *Table) DropKept(ctx context.Context, wanted []volume.Device) {
	for _, id := range t.open.identities() {
		if unlock, free := t.devices.TryLock(id); free {
			if len(t.owners.ofDevice(id)) == 0 {
				_ = t.open.release(id) // the next call tries again
			}
			unlock()
		}
	}
	names := claimNames(wanted)
	if others := t.open.keptExcept(names); len(others) > 0 {
		found, err := t.users.find(ctx, slices.Collect(maps.Values(others)))
		for name, id := range others {
			names[name] = err != nil || slices.ContainsFunc(found, func(h holders.Holder) bool { return h.File == id })
		}
	}
	t.open.dropKept(names)
}

// RefuseKept fails while a process has the device of a kept descriptor open, except for the
// known devices. It is for a volume whose device is not known: it may be that one.
func (t *Table) RefuseKept(ctx context.Context, v *volume.Volume, known []volume.Device) error {
	others := slices.Collect(maps.Values(t.open.keptExcept(claimNames(known))))
	if len(others) == 0 {
		return nil
	}
	found, err := t.users.await(ctx, others, releaseTime)
	if err != nil {
		return volume.Errorf(volume.Busy, "volume %s: its device is not known, and it cannot be proven that no process has it open: %w", v.Target, err)
	}
	if len(found) > 0 {
		return volume.Errorf(volume.Busy, "volume %s: its device is not known, and may be %s, which is open in %s: "+volume.TextEndVM,
			v.Target, describe(found[0].File), nameAll(found))
	}
	return nil
}

func claimNames(devices []volume.Device) map[string]bool {
	names := make(map[string]bool, len(devices))
	for _, d := range devices {
		names[claimName(identityOf(d))] = true
	}
	return names
}

// Close closes the descriptors of this process. The keeper's copies stay.
func (t *Table) Close() { t.open.close() }

// SetReadOnly makes the kernel refuse every write to the device of a read-only volume.
func (t *Table) SetReadOnly(v *volume.Volume) error {
	if v.Device.Kind != volume.BlockDevice || !v.ReadOnly {
		return nil
	}
	held := t.open.get(identityOf(v.Device))
	if held == nil {
		return volume.Errorf(volume.Internal, "volume %s: the device %s is not held", v.Target, v.Device.Path)
	}
	// Do not set the flag on a device that is read-only by itself: our flag would
	// outlive the attachment of, for example, a loop device.
	if already, err := unix.IoctlGetInt(held.fd, unix.BLKROGET); err == nil && already != 0 {
		return nil
	}
	if err := unix.IoctlSetPointerInt(held.fd, unix.BLKROSET, 1); err != nil {
		return volume.Errorf(volume.Internal, "volume %s: the device %s cannot be made read-only: %w", v.Target, v.Device.Path, err)
	}
	return nil
}

// restoreFlag restores the device's own read-only flag.
func (t *Table) restoreFlag(r Request, id identity) error {
	if r.Device.Kind != volume.BlockDevice || !r.ReadOnly || r.WasReadOnly {
		return nil
	}
	if held := t.open.get(id); held != nil {
		return makeWritable(r.Volume, held.fd)
	}
	fd, err := openByIdentity(r.Device, 0)
	if _, failed := errors.AsType[unix.Errno](err); failed && !isNoDevice(err) {
		return volume.Errorf(volume.Internal, "volume %s: the device %s cannot be opened, to make it writable again: %w", r.Target, r.Device.Path, err)
	}
	if err != nil {
		return nil //nolint:nilerr // a device that has gone has no flag
	}
	defer sys.CloseFD(fd)
	return makeWritable(r.Volume, fd)
}

func makeWritable(v *volume.Volume, fd int) error {
	if err := unix.IoctlSetPointerInt(fd, unix.BLKROSET, 0); err != nil && !errors.Is(err, unix.ENXIO) && !errors.Is(err, unix.ENODEV) {
		return volume.Errorf(volume.Internal, "volume %s: the device %s cannot be made writable again: %w", v.Target, v.Device.Path, err)
	}
	return nil
}

// unmountTime bounds the wait for the mounts of a sandbox that has just ended: the
// kernel removes a mount namespace some time after its last process.
const unmountTime = 2 * time.Second

// WaitUnmounted waits until the kernel has no mount of a mountable device any more. To
// detach a device that is still mounted costs data.
func (t *Table) WaitUnmounted(ctx context.Context, r Request) error {
	if !r.Mountable || r.Device.Kind != volume.BlockDevice {
		return nil
	}
	fd, err := openFree(ctx, unmountTime, func() (int, error) { return openByIdentity(r.Device, unix.O_EXCL) })
	if sys.CloseFD(fd); err == nil || isGone(r.Device, err) {
		return nil // a device that is gone has no mounts
	}
	if !errors.Is(err, unix.EBUSY) {
		return unprovenError(r.Volume, err)
	}
	return volume.Errorf(volume.Busy, "volume %s: no sandbox of it is known to live, and yet its device %s (%s) is in use: %s: "+
		"repeat when that has ended: %w", r.Target, r.Device.Path, r.Device, whoHolds(r.Device), cmp.Or(ctx.Err(), err))
}
