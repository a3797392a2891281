// Package claim decides who owns a device. A device has one read-write owner, or several read-only ones, and a claim
// ends only when it is proven that no process of the node has the device open any more.
package claim

import (
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Request is a volume whose device is to be claimed or released.
type Request struct {
	*volume.Volume
	// Mountable is set if this node's kernel mounts the device for the sandbox. The
	// claim is then a plain descriptor, and that mount keeps others out.
	Mountable bool
	// WasReadOnly is the device's read-only flag before the first read-only volume set it, as it is on record.
	WasReadOnly bool
	// Sequence is what SequenceOf was when the device was claimed, as it is on record. It tells the device from a later
	// one with the same number; "" is not known.
	Sequence string
	wanted   time.Time // when a call last wanted the device; zero is now
}

// ErrReplaced is part of the error for a device that has gone, and whose number another one has.
var ErrReplaced = errors.New("it was detached, and another device has its number now")

// IsReplaced is asked of a device that is not open here: one that is keeps its number.
func (r Request) IsReplaced() bool {
	now := ""
	if r.Sequence != "" {
		now = SequenceOf(r.Device)
	}
	return now != "" && now != r.Sequence
}

// Table is the table of claims. An owner is entered under what its device is, so that neither a second name nor a
// second loop device over the same image leads to a second read-write owner. The device is also held open with O_EXCL,
// so that the kernel refuses every mount of it in every mount namespace (but see Request.Mountable).
type Table struct {
	users   *Users
	devices sys.KeyLocks[identity] // one call at a time claims or releases a device
	looks   sys.Looks[identity]    // at what is left of volumes: a device that hangs delays no other
	owners  *owners
	open    *descriptors
}

// NewTable makes a table. The keeper, which may be nil, keeps claims over a restart;
// kept are the descriptors that it gave back, by name.
func NewTable(keeper Keeper, kept map[string]*os.File, users *Users) *Table {
	return &Table{
		users:  users,
		owners: newOwners(users.openers),
		looks:  sys.Looks[identity]{Most: MostHung},
		open:   &descriptors{keeper: keeper, openers: users.openers, held: make(map[identity]*heldDevice), kept: maps.Clone(kept)},
	}
}

func (t *Table) lock(ctx context.Context, v *volume.Volume, id identity) (unlock func(), err error) {
	unlock, err = t.devices.Lock(ctx, id)
	if err != nil {
		return nil, volume.Errorf(volume.ContextKind(err), "volume %s: another operation on its device %s is still under way: %w", v.Target, v.Device, err)
	}
	return unlock, nil
}

// Pending is a claim that is being made: the volume owns the device in the table, and nobody else
// claims or releases it meanwhile. It ends with Keep or Abandon.
type Pending struct {
	table   *Table
	request Request
	dev     *OpenedDevice
	id      identity
	unlock  func()
	// First is set if no other volume has the device: it has to be claimed in the kernel too.
	First bool
	held  *heldDevice // the kernel's claim of the first volume; nil for an image
	stack []identity  // other devices with the same data
}

// Begin begins to claim the device for the volume. It fails with an error that names who has the
// device: another volume, the kernel or, for a device that is not on record yet, a process.
//
// What is claimed in the table, and then in the kernel, is proven to be free after that: before it,
// somebody could still take it. If Begin fails, the volume owns nothing, with one exception: a volume
// on record stays the owner in this table unless its device has gone. A sandbox may have the device.
func (t *Table) Begin(ctx context.Context, r Request, dev *OpenedDevice) (*Pending, error) {
	id := identityOf(dev.Device)
	if !dev.known {
		if err := t.owners.refuseExpected(r.Volume); err != nil { // it may have the lock for ever
			return nil, err
		}
	}
	unlock, err := t.lock(ctx, r.Volume, id)
	if err != nil {
		return nil, err
	}
	p := &Pending{table: t, request: r, dev: dev, id: id, unlock: unlock}
	if err := p.begin(ctx); err != nil {
		return nil, p.Abandon(err)
	}
	return p, nil
}

func (p *Pending) begin(ctx context.Context) error {
	if err := p.table.owners.reserve(p.request.Volume, p.id); err != nil {
		return p.table.users.namingHolder(err)
	}
	if len(p.table.owners.ofDevice(p.id)) == 1 { // this one: what an earlier release failed to close is closed first
		if err := p.table.open.release(p.id); err != nil {
			return err
		}
	}
	p.First = p.table.open.get(p.id) == nil
	var err error
	if p.stack, err = p.table.owners.reserveData(p.request.Volume, p.dev); err != nil {
		return err
	}
	return p.Claim(ctx)
}

// namingHolder adds to the refusal of a device that another volume owns who keeps that volume from being released.
func (u *Users) namingHolder(err error) error {
	owned, is := errors.AsType[*OwnedError](err)
	if !is {
		return err
	}
	for _, held := range u.All() {
		if held.Volume.Target == owned.Target {
			return volume.Errorf(volume.InUse, "%w (it is to be released, and is still open in %s)", err, held.Processes)
		}
	}
	return err
}

// Suspend gives up the kernel's claim, for a program that needs the device for itself. The claim in
// the table stays. Claim makes that of the kernel again.
func (p *Pending) Suspend() {
	if p.held != nil {
		sys.CloseAlone(p.held.fd)
		p.held = nil
	}
}

// Keep completes the claim. It returns the read-only flag that the device had by itself.
func (p *Pending) Keep() (wasReadOnly bool, err error) {
	switch {
	case p.held != nil:
		if err = p.table.open.add(p.id, p.held); err != nil {
			p.held = nil // it is the table's
			err = errors.Join(p.table.open.release(p.id), err)
		}
	case p.id.Block:
		err = p.table.checkShared(p.request, p.id)
	}
	if err != nil {
		return false, p.Abandon(err)
	}
	p.unlock()
	if held := p.table.open.get(p.id); held != nil {
		wasReadOnly = held.wasReadOnly
	}
	return wasReadOnly, nil
}

// Abandon ends the claim after an error, and returns that.
func (p *Pending) Abandon(err error) error {
	p.dev.closeLoop()
	p.Suspend()
	if !p.dev.known || volume.KindOf(err) == volume.NotFound {
		err = errors.Join(p.table.drop(p.request.Key, p.id), err) // an error of drop comes first: it is one to retry
	}
	p.unlock()
	return err
}

// Release ends the volume's claim. It first calls leave, which may be nil, with whether the volume is the last owner of
// the device; meanwhile no other volume claims or releases it. If leave fails, the claim stays. For the last owner,
// Release restores the device's own read-only flag.
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

// drop removes the owner and, if it was the last one, closes the kernel's claim. The caller has the device's lock.
func (t *Table) drop(key volume.Key, primary identity) error {
	t.owners.remove(key)
	if len(t.owners.ofDevice(primary)) > 0 {
		return nil
	}
	return t.open.release(primary)
}

// Has reports whether the volume has its whole claim: it owns the device, and a block device is held open.
func (t *Table) Has(r Request) bool {
	id := identityOf(r.Device)
	return t.owners.has(r.Key, id) && (!id.Block || t.open.get(id) != nil)
}

// MayHave reports whether the volume has its claim, or one of its device was kept over a restart: for a volume whose
// record is lost that can be its own.
func (t *Table) MayHave(r Request) bool {
	return t.Has(r) || !r.Mountable && t.open.keptFile(identityOf(r.Device)) != nil
}

// IsShared reports whether the device has other owners, which are then all read-only.
func (t *Table) IsShared(d volume.Device) bool { return len(t.owners.ofDevice(identityOf(d))) > 1 }

// Kept counts the claims that the keeper holds over a restart.
func (t *Table) Kept() int { return t.open.count() }

// Close closes the descriptors of this process. The keeper's copies stay.
func (t *Table) Close() {
	ended := make(chan struct{})
	go func() {
		t.open.close()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(closeTime): // a device hangs: it must not keep the next daemon from starting
	}
}

const closeTime = 2 * time.Second

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
	if r.IsReplaced() {
		return nil
	}
	fd, err := openByIdentity(r.Device, 0)
	if _, failed := errors.AsType[unix.Errno](err); failed && !errors.Is(err, unix.ENOENT) && !isGone(r.Device, err) {
		return volume.Errorf(volume.Internal, "volume %s: the device %s cannot be opened, to make it writable again: %w", r.Target, r.Device.Path, err)
	}
	if err != nil {
		return nil //nolint:nilerr // a device that has gone has no flag
	}
	defer sys.CloseFD(fd)
	return makeWritable(r.Volume, fd)
}

func makeWritable(v *volume.Volume, fd int) error {
	if err := unix.IoctlSetPointerInt(fd, unix.BLKROSET, 0); err != nil && !openers.IsNoDevice(err) {
		return volume.Errorf(volume.Internal, "volume %s: the device %s cannot be made writable again: %w", v.Target, v.Device.Path, err)
	}
	return nil
}
