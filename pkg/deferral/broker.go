package deferral

import (
	"cmp"
	"context"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
)

// Config is what a Broker is made of.
type Config struct {
	// StateDir holds the records, on tmpfs.
	StateDir string
	// KubeletRoot is the directory below which all targets lie.
	KubeletRoot string
	// Devices says which devices are taken; SetDevices changes it later.
	Devices DevicePolicy
	// Handlers are the runtime handlers, and DefaultHandler the one for an
	// instruction that names none.
	Handlers       []Projector
	DefaultHandler string
	// Keeper keeps claims over a restart; nil means none does.
	Keeper FDKeeper
	// Kept are the descriptors that the keeper gave back, by name.
	Kept map[string]*os.File
	// Adopted lists volumes that other programs published; their devices are
	// owned too. It may be nil.
	Adopted func() []*Volume
	// Preparer looks at devices before they are handed over; nil refuses
	// instructions that ask for it.
	Preparer Preparer
	// OnChange is told of every volume that came, changed or went. It must not
	// block and may be nil.
	OnChange func(Key)
	// OnPublished is told of every volume that was published, not of repeated
	// calls; it may be nil.
	OnPublished func(*Volume)
	// OnRefused is told the kind of each refused claim; it may be nil.
	OnRefused func(Kind)
}

// Broker takes volumes and gives them back, in the order that makes a kill at
// any point harmless: claim the device, write the record, guard the target,
// publish the projection; and the opposite way.
type Broker struct {
	cfg      Config
	targets  targets
	boot     string
	store    *store
	claims   *claims
	guards   guards
	locks    keyLocks
	devices  atomic.Pointer[DevicePolicy]
	handlers map[string]Projector

	mu       sync.RWMutex
	volumes  map[Key]*entry
	problems []error      // records that could not be read
	newer    map[Key]bool // volumes whose records only a newer daemon understands
}

// entry is a volume in memory.
type entry struct {
	rec      *record
	removing bool
	problem  error // what keeps the volume from being whole, if anything
	since    time.Time
}

// Status is a volume and how it stands.
type Status struct {
	*Volume
	// Removing is set while the volume is on its way out.
	Removing bool
	// Problem is what is missing of the volume, or nil; ProblemSince is when it
	// was seen first.
	Problem      error
	ProblemSince time.Time
	// Refusal is set for a volume that was refused: it is not on record.
	Refusal *Refusal
}

// NewBroker opens the state directory. Nothing is served before Reconcile.
func NewBroker(cfg Config) (*Broker, error) {
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	handlers := make(map[string]Projector, len(cfg.Handlers))
	for _, h := range cfg.Handlers {
		handlers[h.Name()] = h
	}
	if handlers[cfg.DefaultHandler] == nil {
		return nil, Errorf(Invalid, "the default handler %q is not configured", cfg.DefaultHandler)
	}
	files, err := openStore(cfg.StateDir)
	if err != nil {
		return nil, err
	}
	b := &Broker{
		cfg: cfg, boot: boot, store: files, claims: newClaims(cfg.Keeper),
		targets: targets{root: cfg.KubeletRoot}, handlers: handlers, volumes: make(map[Key]*entry),
	}
	b.SetDevices(cfg.Devices)
	return b, nil
}

// SetDevices changes which devices are taken from now on.
func (b *Broker) SetDevices(p DevicePolicy) { b.devices.Store(&p) }

// Close gives up the descriptors of this process. Volumes, guards and kept
// claims stay for the next one.
func (b *Broker) Close() {
	b.claims.closeAll()
	b.store.close()
}

// Stage defers a volume. It is idempotent, and a failure changes nothing.
func (b *Broker) Stage(ctx context.Context, in Instruction) (*Volume, error) {
	if err := in.Validate(); err != nil {
		return nil, err
	}
	handler, err := b.handlerFor(&in)
	if err != nil {
		return nil, err
	}
	t, err := b.targets.resolve(in.Target)
	if err != nil {
		return nil, err
	}
	defer t.close()
	unlock, err := b.locks.lock(ctx, t.key())
	if err != nil {
		return nil, err
	}
	defer unlock()
	dev, err := b.devices.Load().open(in.Target, in.Backing)
	if err != nil {
		b.refused(err)
		return nil, err
	}
	defer dev.close()
	if known := b.entry(t.key()); known != nil && !known.removing {
		return b.stageAgain(ctx, known.rec, &in, t, dev)
	} else if known != nil {
		if err := b.undo(ctx, known.rec, t); err != nil {
			return nil, Errorf(Busy, "volume %s: its removal was begun and cannot be ended yet: %w", in.Target, err)
		}
	}
	return b.stageNew(ctx, handler, &in, t, dev)
}

func (b *Broker) handlerFor(in *Instruction) (Projector, error) {
	name := in.Handler
	if name == "" {
		name = b.cfg.DefaultHandler
	}
	handler := b.handlers[name]
	if handler == nil {
		return nil, in.invalid("the runtime handler %q is not configured", clip(name))
	}
	return handler, nil
}

// stageAgain answers a repeated call: the same volume is put right where
// something of it is missing; a different one is refused.
func (b *Broker) stageAgain(ctx context.Context, rec *record, in *Instruction, t *target, dev *openedDevice) (*Volume, error) {
	if !rec.same(in, dev.Device, b.cfg.DefaultHandler) {
		return nil, Errorf(Conflict, "volume %s: the target already holds %s with filesystem %s; "+
			"this call asks for something else: unstage it first", in.Target, rec.Device.Path, rec.FSType)
	}
	if _, err := b.restore(ctx, rec, t); err != nil {
		b.setProblem(rec.Key, err)
		return nil, err
	}
	b.setProblem(rec.Key, nil)
	return &rec.Volume, nil
}

// same tells whether an instruction asks for what is on record.
func (r *record) same(in *Instruction, dev Device, defaultHandler string) bool {
	return r.Device.same(dev) && r.FSType == in.FSType && slices.Equal(r.MountFlags, in.MountFlags) &&
		r.Group == in.Group && r.GroupPolicy == in.GroupPolicy && r.Handler == cmp.Or(in.Handler, defaultHandler)
}

func (b *Broker) stageNew(ctx context.Context, handler Projector, in *Instruction, t *target, dev *openedDevice) (*Volume, error) {
	parent, err := t.openParent()
	if err != nil {
		return nil, err
	}
	defer closeFD(parent)
	rec := b.newRecord(handler, in, t, dev)
	if rec.Driver == "" {
		rec.Driver = t.driver(parent)
	}
	if rec.MadeTarget, err = t.missing(parent); err != nil {
		return nil, err
	}
	if err := handler.Check(&rec.Volume); err != nil {
		return nil, err
	}
	if err := b.claim(ctx, rec, dev, b.preparation(handler, in, rec, dev)); err != nil {
		return nil, err
	}
	failpoint.Hit("stage-claimed")
	if err := b.publish(ctx, handler, rec, t, parent); err != nil {
		return nil, b.rollBack(ctx, rec, err)
	}
	failpoint.Hit("stage-published")
	b.remember(rec)
	if b.cfg.OnPublished != nil {
		b.cfg.OnPublished(&rec.Volume)
	}
	return &rec.Volume, nil
}

func (b *Broker) newRecord(handler Projector, in *Instruction, t *target, dev *openedDevice) *record {
	return &record{
		Version: recordVersion, Boot: b.boot, HostMounts: abilitiesOf(handler).HostMounts,
		Volume: Volume{
			Key: t.key(), Target: in.Target, ResolvedTarget: t.resolved, Backing: in.Backing, Device: dev.Device,
			FSType: in.FSType, MountFlags: slices.Clone(in.MountFlags), ReadOnly: in.readOnly(),
			Group: in.Group, GroupPolicy: in.GroupPolicy, Handler: handler.Name(), Driver: in.Driver,
			CSI: in.CSI.clone(), PodUID: t.podUID(), Created: time.Now().UTC().Truncate(time.Millisecond),
		},
	}
}

// preparation is what is done with the device between the claim in our own table
// and the one in the kernel, which would keep mkfs out too.
func (b *Broker) preparation(handler Projector, in *Instruction, rec *record, dev *openedDevice) func(context.Context) error {
	if in.Format == FormatUnset {
		return nil
	}
	return func(ctx context.Context) error {
		if dev.Kind != BlockDevice || b.cfg.Preparer == nil {
			return Errorf(Unsupported, "volume %s: %s cannot be looked at before it is handed over: "+
				"only block devices can", rec.Target, rec.Device.Path)
		}
		return b.cfg.Preparer.Prepare(ctx, Preparation{
			Device: dev.fd, Target: rec.Target, Path: rec.Device.Path, FSType: rec.FSType, Format: in.Format,
			ReadOnly: rec.ReadOnly, GuestFormats: abilitiesOf(handler).FormatsBlank,
		})
	}
}

// claim takes the device from everybody else.
func (b *Broker) claim(ctx context.Context, rec *record, dev *openedDevice, prepare func(context.Context) error) error {
	err := b.refuseAdopted(rec)
	if err == nil {
		rec.DeviceWasReadOnly, err = b.claims.acquire(ctx, rec, dev, prepare)
	}
	if err != nil {
		b.refused(err)
	}
	return err
}

// refuseAdopted refuses a device that another program has published.
func (b *Broker) refuseAdopted(rec *record) error {
	if b.cfg.Adopted == nil {
		return nil
	}
	for _, other := range b.cfg.Adopted() {
		var st unix.Stat_t
		if unix.Stat(other.Device.Path, &st) != nil || !rec.Device.is(&st) || (other.ReadOnly && rec.ReadOnly) {
			continue
		}
		return Errorf(InUse, "volume %s: its device %s (%s) is published for %s by another program: "+
			"remove that volume with the program that made it", rec.Target, rec.Device.Path, rec.Device, other.Target)
	}
	return nil
}

func (b *Broker) refused(err error) {
	if b.cfg.OnRefused == nil {
		return
	}
	switch kind := KindOf(err); kind {
	case InUse, Denied, Invalid, Unsupported:
		b.cfg.OnRefused(kind)
	}
}

// publish does what follows the claim, in order.
func (b *Broker) publish(ctx context.Context, handler Projector, rec *record, t *target, parent int) error {
	if err := b.store.put(rec); err != nil {
		return err
	}
	failpoint.Hit("stage-recorded")
	if err := b.claims.setReadOnly(&rec.Volume); err != nil {
		return err
	}
	failpoint.Hit("stage-readonly")
	if err := b.guard(rec, t, parent); err != nil {
		return err
	}
	failpoint.Hit("stage-guarded")
	return handler.Publish(ctx, &rec.Volume)
}

// guard mounts the guard. A directory that was made for it just now needs no
// look at what is in it.
func (b *Broker) guard(rec *record, t *target, parent int) (err error) {
	put := b.guards.put
	if rec.MadeTarget {
		made, err := t.mkdir(parent)
		if err != nil {
			return err
		}
		if made {
			put = b.guards.mount
		}
	}
	dir, err := t.openIn(parent)
	if err != nil {
		return err
	}
	defer closeFD(dir)
	failpoint.Hit("stage-made-target")
	return put(t, dir)
}
