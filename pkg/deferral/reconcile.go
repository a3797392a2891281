package deferral

import (
	"context"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
)

// Repair is one thing that Reconcile put right, or could not.
type Repair struct {
	Key    Key
	Action string
	Err    error
}

// ReconcileReport is what Reconcile did.
type ReconcileReport struct {
	Checked int
	Repairs []Repair
}

// Load reads the records and takes up their claims. It is called once, before
// anything is served; Reconcile does the rest and may be called at any time.
func (b *Broker) Load(ctx context.Context) error {
	found, err := b.store.load()
	if err != nil {
		return err
	}
	b.mu.Lock()
	b.problems = found.problems
	b.newer = make(map[Key]bool)
	for _, key := range found.newer {
		b.newer[key] = true
	}
	b.mu.Unlock()
	for _, rec := range found.removing {
		b.enter(rec, true)
	}
	for _, rec := range found.volumes {
		// A record of an earlier boot describes mounts and claims that have
		// gone with it.
		b.enter(rec, rec.Boot != b.boot)
	}
	err = b.each(ctx, func(ctx context.Context, known *entry) {
		if !known.removing {
			b.setProblem(known.rec.Key, b.claims.reclaim(ctx, known.rec, b.cfg.Kept))
		}
	})
	b.dropKept()
	return err
}

func (b *Broker) enter(rec *record, removing bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.volumes[rec.Key] = &entry{rec: rec, removing: removing}
}

// dropKept gives up kept descriptors that belong to no volume on record.
func (b *Broker) dropKept() {
	for name, file := range b.cfg.Kept {
		_ = file.Close()
		if b.cfg.Keeper != nil && !b.claims.holds(name) {
			// Where this fails the kernel still refuses a second owner, which is
			// the safe side; the next restart tries again.
			_ = b.cfg.Keeper.RemoveFD(name)
		}
	}
	b.cfg.Kept = nil
}

func (c *claims) holds(name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, held := range c.held {
		if claimName(id) == name && !held.mountable {
			return true
		}
	}
	return false
}

// each runs f for every volume, a few at a time.
func (b *Broker) each(ctx context.Context, f func(context.Context, *entry)) error {
	b.mu.RLock()
	all := make([]*entry, 0, len(b.volumes))
	for _, known := range b.volumes {
		all = append(all, known)
	}
	b.mu.RUnlock()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(2 * runtime.GOMAXPROCS(0))
	for _, known := range all {
		group.Go(func() error {
			if ctx.Err() == nil {
				f(ctx, known)
			}
			return ctx.Err()
		})
	}
	return group.Wait()
}

// Reconcile compares every record with the node and puts right what differs:
// ends removals that were begun, takes claims again, and rebuilds guards and
// projections; and removes projections and guards of ours that no record knows.
func (b *Broker) Reconcile(ctx context.Context) (ReconcileReport, error) {
	var report collector
	err := b.each(ctx, func(ctx context.Context, known *entry) {
		b.reconcileOne(ctx, known.rec.Key, &report)
	})
	if err != nil {
		return report.ReconcileReport, err
	}
	b.removeOrphans(ctx, &report)
	b.removeStrayGuards(ctx, &report)
	return report.ReconcileReport, nil
}

type collector struct {
	mu sync.Mutex
	ReconcileReport
}

func (c *collector) add(key Key, action string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Repairs = append(c.Repairs, Repair{Key: key, Action: action, Err: err})
}

func (c *collector) checked() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Checked++
}

func (b *Broker) reconcileOne(ctx context.Context, key Key, report *collector) {
	unlock, err := b.locks.lock(ctx, key)
	if err != nil {
		return // the caller ends; what was not looked at is looked at next time
	}
	defer unlock()
	known := b.entry(key)
	if known == nil {
		return
	}
	report.checked()
	if known.removing {
		report.add(key, "end removal", b.undo(ctx, known.rec, nil))
		return
	}
	repaired, err := b.restoreVolume(ctx, known.rec)
	for _, action := range repaired {
		report.add(key, action, nil)
	}
	if err != nil {
		report.add(key, "restore volume", err)
	}
	b.setProblem(key, err)
}

func (b *Broker) restoreVolume(ctx context.Context, rec *record) (repaired []string, err error) {
	t, err := b.targets.resolve(rec.ResolvedTarget)
	if err != nil {
		return nil, err
	}
	defer t.close()
	return b.restore(ctx, rec, t)
}

// restore makes everything of a volume on record exist, and tells what was
// missing.
func (b *Broker) restore(ctx context.Context, rec *record, t *target) (repaired []string, err error) {
	if !b.claims.has(rec.Key) {
		if err := b.claims.reclaim(ctx, rec, nil); err != nil {
			return nil, err
		}
		repaired = append(repaired, "claim device")
	}
	if err := b.claims.setReadOnly(&rec.Volume); err != nil {
		return repaired, err
	}
	guarded, err := b.restoreGuard(t)
	if err != nil {
		return repaired, err
	}
	if guarded {
		repaired = append(repaired, "mount guard")
	}
	handler := b.handlers[rec.Handler]
	if handler == nil {
		return repaired, Errorf(Unsupported, "volume %s: its runtime handler %q is not configured any more",
			rec.Target, rec.Handler)
	}
	return repaired, handler.Publish(ctx, &rec.Volume)
}

func (c *claims) has(key Key) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.byKey[key]) > 0
}

// restoreGuard mounts the guard where it is missing.
func (b *Broker) restoreGuard(t *target) (mounted bool, err error) {
	parent, err := t.openParent()
	if err != nil {
		return false, err
	}
	defer closeFD(parent)
	dir, err := t.make(parent)
	if err != nil {
		return false, err
	}
	defer closeFD(dir)
	stands, err := b.guards.stands(t, dir)
	if err != nil {
		return false, t.guardError("looked at", err)
	}
	if stands {
		return false, nil
	}
	return true, b.guards.put(t, dir)
}

// onRecord tells whether there is a record of a volume, be it one that only a newer
// daemon understands: what stands for that volume is not ours to clear away.
func (b *Broker) onRecord(key Key) bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.volumes[key] != nil || b.newer[key]
}

// removeOrphans retracts projections of ours without a record.
func (b *Broker) removeOrphans(ctx context.Context, report *collector) {
	for _, handler := range b.handlers {
		orphans, err := handler.Orphans(b.onRecord)
		if err != nil {
			report.add("", "list projections of "+handler.Name(), err)
		}
		for _, v := range orphans {
			b.removeOrphan(ctx, handler, v, report)
		}
	}
}

func (b *Broker) removeOrphan(ctx context.Context, handler Projector, v *Volume, report *collector) {
	unlock, err := b.locks.lock(ctx, v.Key)
	if err != nil {
		return
	}
	defer unlock()
	if !b.onRecord(v.Key) {
		report.add(v.Key, "retract orphan", handler.Retract(ctx, v))
	}
}

// removeStrayGuards unmounts guards of ours without a record. A guard is told
// from kubelet's binds of it by standing on the very target that its source
// names.
func (b *Broker) removeStrayGuards(ctx context.Context, report *collector) {
	root, err := openDirPath(b.cfg.KubeletRoot)
	if err != nil {
		return // no kubelet root: nothing can be mounted below it
	}
	defer closeFD(root)
	resolved, err := pathOfFD(root)
	if err != nil {
		return
	}
	mounts, err := readMounts()
	if err != nil {
		report.add("", "read mounts", err)
		return
	}
	for _, m := range mounts {
		key, ok := strings.CutPrefix(m.source, guardPrefix)
		if _, inside := below(resolved, m.point); !ok || !inside || Key(key) != KeyOf(m.point) {
			continue
		}
		if !b.onRecord(Key(key)) {
			b.removeStrayGuard(ctx, m.point, report)
		}
	}
}

func (b *Broker) removeStrayGuard(ctx context.Context, point string, report *collector) {
	t, err := b.targets.resolve(path.Clean(point))
	if err != nil {
		return
	}
	defer t.close()
	unlock, err := b.locks.lock(ctx, t.key())
	if err != nil {
		return
	}
	defer unlock()
	if !b.onRecord(t.key()) {
		report.add(t.key(), "unmount stray guard", b.guards.remove(t, false))
	}
}

// HostMounts lists where this mount namespace has the device of a volume
// mounted: anything but nothing is a fault.
func HostMounts(v *Volume) ([]string, error) {
	mounts, err := readMounts()
	if err != nil {
		return nil, err
	}
	var points []string
	if v.Device.Kind != BlockDevice {
		return nil, nil
	}
	number := strings.TrimPrefix(string(blockIdentity(v.Device.Major, v.Device.Minor)), "b")
	for _, m := range mounts {
		if m.majorMinor == number {
			points = append(points, m.point)
		}
	}
	slices.Sort(points)
	return points, nil
}
