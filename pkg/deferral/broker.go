// Package deferral defers volumes: it validates an instruction, claims the device, writes the record, guards the
// target, and has a runtime handler publish the volume; and it undoes all of that in the opposite order.
//
// Package claim has the first of these steps, and package guard the third. This package has the records, and the order.
//
// It knows no gRPC and no runtime. Runtime handlers are reached through the small Projector interface. It is for this
// project's daemon; nothing in it is promised to others.
package deferral

import (
	"cmp"
	"context"
	"os"
	"sync/atomic"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Config is what a Broker is made of.
type Config struct {
	// StateDir holds the records, on tmpfs.
	StateDir string
	// Root is the directory below which all targets lie.
	Root string
	// Notice is in each guard, for a person who finds it.
	Notice string
	// Describe, which may be nil, adds to a volume what follows from its target path, such as who uses it. Rel is the
	// path below Root. Unless dir is sys.NoFD, it is a descriptor of the directory that holds the target.
	Describe func(v *volume.Volume, rel string, dir int)
	// Devices is which devices are accepted; SetDevices changes it later.
	Devices claim.DevicePolicy
	// Handlers are the runtime handlers, and DefaultHandler the one for an instruction that names none.
	Handlers       []Projector
	DefaultHandler string
	// Openers answers who has a device open; nil is openers.New().
	Openers claim.Openers
	// Keeper keeps claims over a restart; it may be nil.
	Keeper claim.Keeper
	// Kept are the descriptors that the keeper gave back, by name.
	Kept map[string]*os.File
	// Adopted lists volumes that other programs published; their devices are owned too. It may be nil.
	Adopted func() []*volume.Volume
	// Preparer checks devices before they are handed over; nil refuses instructions that ask for it.
	Preparer Preparer
	// Observer, which may be nil, is told what happens to volumes.
	Observer Observer
	// EndOrphans has a release end the orphans that have the device.
	EndOrphans bool
}

// Observer is told what happens to volumes. Its methods must not block.
type Observer interface {
	// Changed is called for every volume that was added, changed or removed.
	Changed(volume.Key)
	// Published is called for every volume that was published, but not for repeated calls.
	Published(*volume.Volume)
	// Leaving is called for a volume that no sandbox has any more, while its device is still claimed.
	Leaving(*volume.Volume)
	// OrphanEnded is called for each orphan that somebody has ended, or could not end; one without PID is not known.
	OrphanEnded(v *volume.Volume, one Orphan, by string, err error)
	// ClaimRefused is called with the kind of each refused claim.
	ClaimRefused(volume.Kind)
}

// NoObserver is an Observer that ignores everything, for others to embed.
type NoObserver struct{}

// Changed implements Observer.
func (NoObserver) Changed(volume.Key) {}

// Published implements Observer.
func (NoObserver) Published(*volume.Volume) {}

// Leaving implements Observer.
func (NoObserver) Leaving(*volume.Volume) {}

// OrphanEnded implements Observer.
func (NoObserver) OrphanEnded(*volume.Volume, Orphan, string, error) {}

// ClaimRefused implements Observer.
func (NoObserver) ClaimRefused(volume.Kind) {}

// Broker defers volumes and releases them, in the order that makes a kill at any point harmless: claim the device,
// write the record, mount the guard, publish the projection; and the opposite order to release.
type Broker struct {
	cfg      Config
	boot     string
	devices  atomic.Pointer[claim.DevicePolicy]
	targets  *targets
	store    *store
	claims   *claim.Table
	users    *claim.Users
	locks    *volumeLocks
	handlers *handlerSet
	table    *table

	restorer   *restorer
	orphans    *orphans
	remover    *remover
	lost       *lostVolumes
	reconciler *reconciler
}

// NewBroker opens the state directory. Call Load before anything is served.
func NewBroker(cfg Config) (*Broker, error) {
	boot, err := sys.BootID()
	if err != nil {
		return nil, err
	}
	handlers, err := newHandlerSet(cfg.Handlers, cfg.DefaultHandler)
	if err != nil {
		return nil, err
	}
	files, err := openStore(cfg.StateDir)
	if err != nil {
		return nil, err
	}
	if cfg.Describe == nil {
		cfg.Describe = func(*volume.Volume, string, int) {}
	}
	if cfg.Openers == nil {
		cfg.Openers = openers.New()
	}
	cfg.Observer = cmp.Or[Observer](cfg.Observer, NoObserver{})
	b := &Broker{
		cfg: cfg, boot: boot, store: files, handlers: handlers, locks: &volumeLocks{}, table: newTable(cfg.Observer),
		targets: &targets{
			guard.NewRoot(cfg.Root, cfg.Notice), cfg.Describe, (*guard.Target).Mount, (*guard.Target).Restore, (*guard.Target).Remove,
		},
	}
	b.SetDevices(cfg.Devices)
	b.users = claim.NewUsers(cfg.Openers, func() []string { return b.devices.Load().Servers }, cfg.Observer.Changed)
	b.claims = claim.NewTable(cfg.Keeper, cfg.Kept, b.users)
	b.restorer = &restorer{claims: b.claims, targets: b.targets, handlers: handlers}
	b.orphans = &orphans{
		boot: boot, claims: b.claims, users: b.users, handlers: handlers, table: b.table, auto: cfg.EndOrphans, observer: cfg.Observer, patience: claim.EndTime,
	}
	b.remover = &remover{
		boot: boot, targets: b.targets, store: files, claims: b.claims, users: b.users, handlers: handlers, table: b.table,
		orphans: b.orphans, observer: cfg.Observer,
	}
	b.lost = &lostVolumes{
		boot: boot, targets: b.targets, store: files, claims: b.claims, locks: b.locks, handlers: handlers, table: b.table,
		remover: b.remover,
	}
	b.reconciler = &reconciler{
		targets: b.targets, locks: b.locks, handlers: handlers, table: b.table, restorer: b.restorer, remover: b.remover, lost: b.lost,
	}
	return b, nil
}

// SetDevices changes which devices are accepted from now on.
func (b *Broker) SetDevices(p claim.DevicePolicy) { b.devices.Store(&p) }

// Close closes the descriptors of this process. Volumes, guards and kept claims stay for the next one.
func (b *Broker) Close() { b.claims.Close() }

// Load reads the records and claims their devices. It is called once, before anything
// is served; Reconcile does the rest.
func (b *Broker) Load(ctx context.Context) error {
	found, err := b.store.load()
	if err != nil {
		return err
	}
	for _, rec := range found.removing {
		b.table.enter(&entry{rec: rec, removing: true})
	}
	for _, rec := range found.volumes {
		// The mounts and claims of an earlier boot are gone.
		b.table.enter(&entry{rec: rec, removing: rec.Boot != b.boot})
	}
	forced, problems := b.store.loadHeld(b.boot, os.Remove)
	problems = append(problems, found.problems...)
	for _, h := range forced {
		b.users.Force(h, b.store.dropHeld) // reconcile asks who has it
	}
	if err = b.lost.enter(ctx, found.unusable); err != nil {
		problems = append(problems, err)
	}
	b.table.setLoadProblems(problems, err != nil)
	b.reconciler.listed.Store(err == nil && len(b.Lost()) == 0)
	// A removal that waits for a process keeps its claim too. If its device has another
	// owner by now, that one comes first. A device that hangs has its owner before it is claimed again.
	parts := [2][]*entry{}
	for n, removing := range []bool{false, true} {
		parts[n] = b.table.where(func(e *entry) bool { return e.removing == removing && e.rec.Boot == b.boot })
		for _, known := range parts[n] {
			b.claims.Expect(known.rec.claim())
		}
	}
	for _, part := range parts {
		err = b.table.each(ctx, part, func(ctx context.Context, known *entry) { b.reclaim(ctx, known.rec.Key) })
	}
	b.lost.dropKept(ctx)
	return err // the caller's context has ended, and both loops with it
}

// reclaim claims the device of a volume at the start. It has the volume's lock, because it may be left behind:
// calls come meanwhile.
func (b *Broker) reclaim(ctx context.Context, key volume.Key) {
	unlock, err := b.locks.lock(ctx, key)
	if err != nil {
		return
	}
	defer unlock()
	if known := b.table.get(key); known != nil {
		b.table.setProblem(key, b.lost.reclaim(ctx, known))
	}
}

// Reconcile compares every record with the node and repairs what differs: it ends
// removals that were begun, claims devices again, restores guards and projections, and
// removes projections and guards of ours that have no record. It may run at any time.
func (b *Broker) Reconcile(ctx context.Context) (ReconcileReport, error) {
	report, err := b.reconciler.run(ctx)
	if err == nil {
		b.claims.Refresh(ctx, func(*volume.Volume) bool { return true })
	}
	return report, err
}

// Defer defers a volume. It is idempotent, and a failure changes nothing: the error of a volume that stays on record is
// one to retry, for a final one would promise that nothing is left. Another volume on its target is a Conflict.
func (b *Broker) Defer(ctx context.Context, in volume.Instruction) (v *volume.Volume, err error) {
	defer func() {
		if err != nil {
			err = b.table.notFinal(in.Target, b.KeyOfTarget, err)
		}
	}()
	if err := Validate(&in); err != nil {
		return nil, err
	}
	handler, err := b.handlers.choose(&in)
	if err != nil {
		return nil, err
	}
	t, err := b.targets.root.Resolve(in.Target)
	if err != nil {
		return nil, err
	}
	defer t.Close()
	if err := b.table.refuseHung(t.Key); err != nil {
		return nil, err
	}
	unlock, err := b.locks.lock(ctx, t.Key)
	if err != nil {
		return nil, err
	}
	defer unlock()
	dev, err := b.devices.Load().Open(in.Target, in.Backing)
	if err != nil {
		b.refused(err)
		return nil, err
	}
	defer dev.Close()
	a := &attempt{b: b, in: &in, handler: handler, target: t, dev: dev}
	known, err := b.lost.ofTarget(ctx, t)
	switch {
	case err != nil:
		return nil, err
	case known == nil:
		return a.begin(ctx)
	case known.removing:
		if err := b.remover.undo(ctx, known.rec, t, false); err != nil {
			return nil, volume.Errorf(volume.Busy, "volume %s: its removal was begun and cannot be ended yet: %w", in.Target, err)
		}
		return a.begin(ctx)
	case known.lost != nil:
		return a.again(ctx, known)
	default:
		return a.repeat(ctx, known.rec)
	}
}

// refused counts a claim that was refused by a party or by policy.
func (b *Broker) refused(err error) {
	switch kind := volume.KindOf(err); kind {
	case volume.InUse, volume.Busy, volume.Denied, volume.Invalid, volume.Unsupported:
		b.cfg.Observer.ClaimRefused(kind)
	}
}

// undoTime bounds a removal, which goes on if its caller is gone.
const undoTime = 30 * time.Second

// Release releases a volume that its user has left. A target that is unknown is a success. A refusal is
// shown with the volume until it is released or published again.
func (b *Broker) Release(ctx context.Context, path string) (*volume.Volume, error) {
	var key volume.Key
	t, err := b.targets.root.Resolve(path)
	if err == nil {
		defer t.Close()
		key = t.Key
	}
	if known := movedFrom(b.table, path, key); known != nil && (err == nil || volume.KindOf(err) == volume.Invalid) {
		return &known.rec.Volume, volume.Errorf(volume.Busy, "volume %s: it is on record, published while the root directory was not "+
			"what it is today: put that back to release it", path)
	}
	if err != nil {
		return nil, err
	}
	v, err := b.release(ctx, t)
	if v != nil && err != nil && volume.KindOf(err) != volume.Canceled {
		b.table.setRefusal(v.Key, err)
	}
	return v, err
}

func (b *Broker) release(ctx context.Context, t *guard.Target) (*volume.Volume, error) {
	asked, err := b.lost.ofFreeTarget(ctx, t)
	var forgotten *ForgottenError
	if err == nil && asked != nil && !asked.removing {
		forgotten, err = b.remover.refuseRelease(ctx, asked)
	}
	if err != nil && asked != nil {
		return &asked.rec.Volume, err
	}
	unlock, err := b.locks.lock(ctx, t.Key)
	if err != nil {
		return nil, err
	}
	defer unlock()
	known := b.table.get(t.Key)
	if known == nil {
		return nil, b.remover.cleanUnknown(ctx, t)
	}
	if !known.removing && (asked == nil || known.rec != asked.rec) { // it may have a sandbox by now
		return &known.rec.Volume, volume.Errorf(volume.Busy, "volume %s: it was published or changed meanwhile: repeat", t.Given)
	}
	if forgotten != nil {
		if err := b.remover.disown(ctx, known.rec, forgotten); err != nil {
			return &known.rec.Volume, err
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	err = b.remover.undoAsked(ctx, known.rec, t)
	if known.lost != nil {
		b.lost.dropKept(ctx)
	}
	return &known.rec.Volume, err
}

// ReleaseKey releases a volume by its key, as Release does. With force it does not check
// whether the device is in use: a sandbox that has it goes on writing to it, beside the
// next owner of the device. Force is for an operator who knows that no sandbox does.
func (b *Broker) ReleaseKey(ctx context.Context, key volume.Key, force bool) (*volume.Volume, error) {
	known := b.table.get(key)
	if known == nil {
		return nil, volume.Errorf(volume.NotFound, "volume %s is not on record: there is nothing to release", key.Short())
	}
	if !force && known.rec.ResolvedTarget != "" {
		t, err := b.targets.ofRecord(known.rec)
		if err != nil {
			return &known.rec.Volume, err
		}
		defer t.Close()
		return b.release(ctx, t)
	}
	if err := b.table.refuseHung(key); err != nil { // also by force: what hangs may still change the device
		return &known.rec.Volume, err
	}
	unlock, err := b.locks.lock(ctx, key)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if known = b.table.get(key); known == nil {
		return nil, nil //nolint:nilnil // it was released meanwhile
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	v := &known.rec.Volume
	switch _, unread := readRecord(known.file); {
	case force:
		err = b.remover.noteForced(known.rec)
	case b.lost.mustStay(known, unread):
		err = known.lost
	default: // a lost volume whose target is not known
		err = b.remover.refuseUsed(ctx, known.rec)
	}
	if err == nil {
		err = b.remover.undo(ctx, known.rec, nil, force)
	}
	if err != nil {
		return v, err
	}
	if known.lost != nil {
		b.lost.dropKept(ctx)
	}
	if force && v.Device.Kind != "" {
		_ = b.claims.RefuseUsed(ctx, claim.Request{Volume: v}, 0) // for Users
	}
	return v, nil
}

type volumeLocks struct{ keys sys.KeyLocks[volume.Key] }

func (l *volumeLocks) lock(ctx context.Context, key volume.Key) (unlock func(), err error) {
	unlock, err = l.keys.Lock(ctx, key)
	if err != nil {
		return nil, volume.Errorf(volume.ContextKind(err), "another operation on volume %s is still under way: %w", key.Short(), err)
	}
	return unlock, nil
}

// targets resolves targets, and describes the volumes on them.
type targets struct {
	root     *guard.Root
	describe func(v *volume.Volume, rel string, dir int)
	// mount, restore and remove are those of guard.Target, except in unit tests, which cannot mount.
	mount   func(t *guard.Target, parent int, missing bool) (mounted bool, err error)
	restore func(t *guard.Target) (mounted bool, err error)
	remove  func(t *guard.Target, directory bool) error
}

// volume returns a volume with what is known from its target path alone.
func (ts *targets) volume(t *guard.Target) *volume.Volume {
	v := &volume.Volume{Key: t.Key, Target: t.Given, ResolvedTarget: t.Resolved}
	ts.describe(v, t.Rel, sys.NoFD)
	return v
}

// ofRecord resolves the target of a volume on record. The error is Invalid if that leads elsewhere today.
func (ts *targets) ofRecord(rec *record) (*guard.Target, error) {
	t, err := ts.root.Resolve(rec.ResolvedTarget)
	if err == nil && t.Key != rec.Key {
		t.Close()
		return nil, volume.Errorf(volume.Invalid, "volume %s: its target leads to %s today: put the root directory back to where it was", rec.Target, t.Resolved)
	}
	return t, err
}
