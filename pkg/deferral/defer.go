package deferral

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/step"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
)

// attempt is one call to defer a volume: the instruction, and what it was resolved to.
// The caller has the volume's lock.
type attempt struct {
	b       *Broker
	in      *volume.Instruction
	handler Projector
	target  *guard.Target
	dev     *claim.OpenedDevice
}

// repeat answers a repeated call. It restores what is missing of the same volume, and refuses a different one.
func (a *attempt) repeat(ctx context.Context, rec *record) (*volume.Volume, error) {
	if !rec.same(a.in, a.dev.Device) {
		return nil, volume.Errorf(volume.Conflict, "volume %s: the target already holds %s with filesystem %s; "+
			"this call asks for something else: unstage it first", a.in.Target, rec.Device.Path, rec.FSType)
	}
	_, err := a.b.restorer.restore(ctx, rec, a.target)
	if known := a.b.table.get(rec.Key); err != nil || known == nil || !known.hasOrphans() {
		a.b.table.setProblem(rec.Key, err)
	}
	if err != nil {
		// A final code would promise that nothing is left.
		return nil, volume.Errorf(volume.Busy, "volume %s: it is published, and cannot be put right yet: %w", a.in.Target, err)
	}
	a.b.table.setRefusal(rec.Key, nil)
	return &rec.Volume, nil
}

// same reports whether an instruction asks for what is on record. The default handler may have changed since.
func (r *record) same(in *volume.Instruction, dev volume.Device) bool {
	return r.Device.Same(dev) && r.FSType == in.FSType && slices.Equal(mountopt.Split(r.MountFlags), mountopt.Split(in.MountFlags)) &&
		r.Group == in.Group && r.GroupPolicy == in.GroupPolicy && (in.Handler == "" || r.Handler == in.Handler)
}

// again writes a new record for a lost volume. The orchestrator repeats its calls for a volume that is in use, and the
// instruction then has all that the record had, except for fields that a newer daemon wrote.
func (a *attempt) again(ctx context.Context, known *entry) (*volume.Volume, error) {
	if handler := a.b.handlers.byName[known.rec.Handler]; handler != nil && a.in.Handler == "" {
		a.handler = handler
	}
	rec, was := a.record(sys.NoFD), known.rec
	if errors.Is(known.lost, errNewerRecord) || was.Device.Kind != "" && !was.Device.Same(rec.Device) || was.Handler != "" && was.Handler != rec.Handler {
		return nil, known.lost
	}
	rec.Driver = cmp.Or(rec.Driver, was.Driver)
	rec.DeviceWasReadOnly, rec.MadeTarget = was.DeviceWasReadOnly, was.MadeTarget
	err := a.check(&rec.Volume)
	fresh := was.Device.Kind == "" && !a.b.claims.MayHave(rec.claim()) // another device may be the volume's
	switch {
	case err != nil:
	case fresh:
		err = a.claim(ctx, rec)
	default:
		err = a.b.claims.Reclaim(ctx, rec.claim())
	}
	if err != nil {
		return nil, err
	}
	rec.Sequence = claim.SequenceOf(rec.Device)
	if err = a.b.store.put(rec); err != nil && fresh {
		err = errors.Join(err, a.b.claims.Release(rec.claim(), nil)) // the table does not know whose device it is
	}
	if err != nil {
		return nil, err
	}
	a.b.lost.found(rec)
	return a.repeat(ctx, rec)
}

// begin defers a volume that does not exist yet.
func (a *attempt) begin(ctx context.Context) (*volume.Volume, error) {
	parent, err := a.target.OpenParent()
	if err != nil {
		return nil, err
	}
	defer sys.CloseFD(parent)
	rec := a.record(parent)
	if rec.MadeTarget, err = a.target.Missing(parent); err != nil {
		return nil, err
	}
	if err := a.check(&rec.Volume); err != nil {
		return nil, err
	}
	if err := a.claim(ctx, rec); err != nil {
		a.b.refused(err)
		return nil, err
	}
	failpoint.Hit("stage-claimed")
	if err := a.publish(ctx, rec, parent); err != nil {
		return nil, a.b.remover.rollBack(ctx, rec, err)
	}
	failpoint.Hit("stage-published")
	a.b.table.add(rec)
	a.b.cfg.Observer.Published(&rec.Volume)
	return &rec.Volume, nil
}

// check refuses what the handler does not take, and mount options that its sandboxes may not be given. Where this
// node's kernel makes the mount, only options are taken that are known to concern nothing but the filesystem.
func (a *attempt) check(v *volume.Volume) error {
	if err := a.handler.Check(v); err != nil {
		return err
	}
	check := mountopt.Check
	if a.handler.Abilities().HostMounts {
		check = mountopt.CheckForHost
	}
	for _, option := range mountopt.Options(v) {
		if err := check(v.FSType, option); err != nil {
			return volume.Errorf(volume.Unsupported, "volume %s: %w", v.Target, err)
		}
	}
	return nil
}

// record is the record that the instruction asks for, with what is known by the directory that holds the target.
func (a *attempt) record(dir int) *record {
	flags := mountopt.Split(a.in.MountFlags)
	rec := &record{
		Version: recordVersion, Boot: a.b.boot, HostMounts: a.handler.Abilities().HostMounts,
		Volume: volume.Volume{
			Key: a.target.Key, Target: a.in.Target, ResolvedTarget: a.target.Resolved, Backing: a.in.Backing, Device: a.dev.Device,
			FSType: a.in.FSType, MountFlags: flags, ReadOnly: slices.Contains(flags, "ro"),
			Group: a.in.Group, GroupPolicy: a.in.GroupPolicy, Handler: a.handler.Name(), Driver: a.in.Driver,
			Origin: a.in.Origin.Clone(), KeepSize: a.in.KeepSize, Created: time.Now().UTC().Truncate(time.Millisecond),
		},
	}
	a.b.targets.describe(&rec.Volume, a.target.Rel, dir)
	rec.share()
	return rec
}

// claim claims the device against everybody else.
func (a *attempt) claim(ctx context.Context, rec *record) (err error) {
	ctx, end := step.Begin(ctx, "claim")
	defer end()
	if a.b.cfg.Adopted != nil {
		if err := a.b.users.RefuseAdopted(ctx, &rec.Volume, a.b.cfg.Adopted()); err != nil {
			return err
		}
	}
	pending, err := a.b.claims.Begin(ctx, rec.claim(), a.dev)
	if err != nil {
		return err
	}
	if needed, mayWrite := a.preparation(rec); needed && pending.First {
		if mayWrite {
			pending.Suspend() // mkfs and resize2fs need the device for themselves
		}
		err = a.prepare(ctx, rec)
		// After these minutes the caller may have gone. Its next call would wait as long, if this one ended here.
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), undoTime)
		defer cancel()
		if err == nil && mayWrite {
			err = pending.Claim(ctx)
		}
	}
	if err != nil {
		return pending.Abandon(err)
	}
	rec.DeviceWasReadOnly, err = pending.Keep()
	rec.Sequence = claim.SequenceOf(rec.Device) // it stays while the device is open here
	return err
}

// preparation reports whether the device is to be examined before it is handed over, and whether that may
// write to it. Without a format policy, only the journal of a read-only volume is checked.
func (a *attempt) preparation(rec *record) (needed, mayWrite bool) {
	isBlock := a.dev.Kind == volume.BlockDevice
	switch a.in.Format {
	case volume.FormatUnset:
		return rec.ReadOnly && isBlock && a.b.cfg.Preparer != nil, false
	case volume.FormatDriver:
		return isBlock, a.grows()
	default:
		return true, true
	}
}

// grows reports whether a filesystem that is smaller than its device is grown on this node.
func (a *attempt) grows() bool { return !a.in.KeepSize && !a.handler.Abilities().GrowsAtMount }

func (a *attempt) prepare(ctx context.Context, rec *record) error {
	if a.dev.Kind != volume.BlockDevice || a.b.cfg.Preparer == nil {
		return volume.Errorf(volume.Unsupported, "volume %s: %s cannot be checked before it is handed over: "+
			"only block devices can", rec.Target, rec.Device.Path)
	}
	ctx, end := step.Begin(ctx, "prepare the filesystem")
	defer end()
	return a.b.cfg.Preparer.Prepare(ctx, Preparation{
		Device: a.dev.FD, Volume: &rec.Volume, Instruction: a.in, NoReplay: mountopt.SkipsReplay(rec.MountFlags),
		Grow: a.grows(),
	})
}

// publish does what follows the claim, in order, and also if the caller has gone.
func (a *attempt) publish(ctx context.Context, rec *record, parent int) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	if err := a.b.store.put(rec); err != nil {
		return err
	}
	failpoint.Hit("stage-recorded")
	if err := a.b.claims.SetReadOnly(&rec.Volume); err != nil {
		return err
	}
	failpoint.Hit("stage-readonly")
	if _, err := a.b.targets.mount(a.target, parent, rec.MadeTarget); err != nil {
		return err
	}
	failpoint.Hit("stage-guarded")
	ctx, end := step.Begin(ctx, "project")
	defer end()
	_, err := a.handler.Publish(ctx, &rec.Volume)
	return err
}

// GrowAtMount records that the filesystem of a volume is to be grown to its device at the next mount, and publishes
// that to the handler. If the handler's sandboxes do not grow filesystems, the record is only shown to people.
func (b *Broker) GrowAtMount(ctx context.Context, key volume.Key, size int64) error {
	unlock, err := b.locks.lock(ctx, key)
	if err != nil {
		return err
	}
	defer unlock()
	known := b.table.get(key)
	if known == nil || known.removing {
		return volume.Errorf(volume.NotFound, "volume %s is not published any more", key.Short())
	}
	if known.lost != nil {
		return known.lost
	}
	next, err := b.putGrowth(known.rec, size)
	if err != nil {
		return err
	}
	if handler := b.handlers.byName[next.Handler]; handler != nil {
		_, err := handler.Publish(ctx, &next.Volume)
		return err
	}
	return nil // its projection is restored when the handler is configured again
}

// EndGrowth records that a growth to size is done, unless another growth is on record by now.
// During another operation on the volume it does nothing: the caller repeats it.
func (b *Broker) EndGrowth(key volume.Key, size int64) error {
	unlock, free := b.locks.keys.TryLock(key)
	if !free {
		return nil
	}
	defer unlock()
	known := b.table.get(key)
	if known == nil || known.removing || known.lost != nil || known.rec.GrowTo != size {
		return nil
	}
	_, err := b.putGrowth(known.rec, 0)
	return err
}

// putGrowth must be called with the volume's lock held.
func (b *Broker) putGrowth(rec *record, size int64) (*record, error) {
	next := *rec
	next.GrowTo = size
	if err := b.store.put(&next); err != nil {
		return nil, err
	}
	b.table.replace(next.Key, func(e *entry) { e.rec = &next })
	return &next, nil
}
