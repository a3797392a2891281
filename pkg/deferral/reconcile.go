package deferral

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Repair is one thing that Reconcile repaired, or failed to.
type Repair struct {
	// Volume has only its key if it has no record, and not even that if the repair is of none.
	Volume *volume.Volume
	Action string
	Err    error
}

// ReconcileReport is what Reconcile did.
type ReconcileReport struct {
	Checked int
	Repairs []Repair
}

// restorer makes everything of a volume on record exist.
type restorer struct {
	claims   *claim.Table
	targets  *targets
	handlers *handlerSet
}

// restore restores what is missing of a volume, and reports what that was. Without a target its guard stands. A claim
// does not show that its device is there.
func (r *restorer) restore(ctx context.Context, rec *record, t *guard.Target) (repaired []string, err error) {
	if !r.claims.Has(rec.claim()) {
		if err := r.claims.Reclaim(ctx, rec.claim()); err != nil {
			if errors.Is(err, claim.ErrReplaced) { // no sandbox may find it under the name
				err = errors.Join(err, r.handlers.withdraw(ctx, &rec.Volume, false))
			}
			return nil, err
		}
		repaired = append(repaired, "claim device")
	}
	if err := r.claims.SetReadOnly(&rec.Volume); err != nil {
		return repaired, err
	}
	if t != nil {
		guarded, err := r.targets.restore(t)
		if err != nil {
			return repaired, err
		}
		if guarded {
			repaired = append(repaired, "mount guard")
		}
	}
	handler := r.handlers.byName[rec.Handler]
	if handler == nil {
		return repaired, volume.Errorf(volume.Unsupported, "volume %s: its runtime handler %q is not configured any more",
			rec.Target, rec.Handler)
	}
	published, err := handler.Publish(ctx, &rec.Volume)
	if published && err == nil {
		repaired = append(repaired, "publish to runtime")
	}
	if err == nil && claim.HasVanished(rec.Device) {
		err = volume.Errorf(volume.NotFound, "volume %s: its device %s (%s) is not there any more, although a sandbox may use it: "+
			"find out what detached it", rec.Target, rec.Device.Path, rec.Device)
	}
	return repaired, err
}

// restoreRecord is restore with the target of the record. The caller has the volume's lock. A guard that was
// examined is one system call from then on, while that says that nothing has changed.
func (r *restorer) restoreRecord(ctx context.Context, rec *record) (repaired []string, err error) {
	if rec.guard.Stands(rec.ResolvedTarget) {
		return r.restore(ctx, rec, nil)
	}
	t, err := r.targets.ofRecord(rec)
	if err != nil {
		return nil, err
	}
	defer t.Close()
	repaired, err = r.restore(ctx, rec, t)
	rec.guard = t.Seen
	return repaired, err
}

type reconciler struct {
	targets  *targets
	locks    *volumeLocks
	handlers *handlerSet
	table    *table
	restorer *restorer
	remover  *remover
	lost     *lostVolumes
	late     collector // what volumes that were left behind came to: it is in the next report
	// listed is set after a Load that found nothing on the node without a record: the first run, right after it, need
	// not look again.
	listed atomic.Bool
}

// collector makes a report. What comes after its end is added to late.
type collector struct {
	late *collector

	mu     sync.Mutex
	report ReconcileReport
	ended  bool
}

func (c *collector) add(v *volume.Volume, action string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		c.late.add(v, action, err)
		return
	}
	c.report.Repairs = append(c.report.Repairs, Repair{Volume: v, Action: action, Err: err})
}

// take returns what was collected so far, and begins anew or ends.
func (c *collector) take(end bool) ReconcileReport {
	c.mu.Lock()
	defer c.mu.Unlock()
	taken := c.report
	c.report, c.ended = ReconcileReport{}, end
	return taken
}

func (c *collector) checked() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.report.Checked++
}

func (r *reconciler) run(ctx context.Context) (ReconcileReport, error) {
	found := collector{late: &r.late, report: r.late.take(false)}
	err := r.table.each(ctx, r.table.all(), func(ctx context.Context, known *entry) {
		r.reconcile(ctx, known.rec.Key, &found)
	})
	if err != nil {
		return found.take(true), err
	}
	orphans := r.remover.orphans
	err = r.table.each(ctx, orphans.seen(), func(ctx context.Context, known *entry) {
		if orphans.endSeen(ctx, known) {
			r.reconcile(ctx, known.rec.Key, &found)
		}
	})
	if err != nil {
		return found.take(true), err
	}
	for _, known := range r.table.left() {
		found.add(&known.rec.Volume, "restore volume", r.table.refuseHung(known.rec.Key))
	}
	if !r.listed.Swap(false) {
		r.removeOrphans(ctx, &found)
		r.removeStrayGuards(ctx, &found)
	}
	r.lost.dropKept(ctx)
	r.table.serving.Store(true)
	return found.take(true), nil
}

func (r *reconciler) reconcile(ctx context.Context, key volume.Key, report *collector) {
	if known := r.table.get(key); known != nil && known.lost != nil && !r.lost.reconcile(ctx, known, report) {
		report.checked()
		return
	}
	unlock, err := r.locks.lock(ctx, key)
	if err != nil {
		return // the caller ends; the next run checks this volume
	}
	defer unlock()
	known := r.table.get(key)
	if known == nil {
		return
	}
	report.checked()
	if known.removing {
		report.add(&known.rec.Volume, "end removal", r.remover.undo(ctx, known.rec, nil, false))
		return
	}
	repaired, err := r.restorer.restoreRecord(ctx, known.rec)
	for _, action := range repaired {
		report.add(&known.rec.Volume, action, nil)
	}
	if err == nil {
		err = r.remover.orphans.look(ctx, known)
	}
	if err != nil {
		report.add(&known.rec.Volume, "restore volume", err)
	}
	r.table.setProblem(key, err)
}

// removeOrphans retracts projections of ours without a record.
func (r *reconciler) removeOrphans(ctx context.Context, report *collector) {
	for _, handler := range r.handlers.byName {
		orphans, err := handler.Orphans(r.table.has)
		if err != nil {
			report.add(&volume.Volume{}, "list projections of "+handler.Name(), err)
		}
		for _, v := range orphans {
			r.removeUnknown(v, "retract orphan", report,
				func() error { return refuseInUse(ctx, handler, v) },
				func() error { return handler.Retract(ctx, v) })
		}
	}
}

// removeStrayGuards unmounts guards of ours without a record.
func (r *reconciler) removeStrayGuards(ctx context.Context, report *collector) {
	points, err := r.targets.root.Points(ctx, r.table.has)
	if err != nil {
		report.add(&volume.Volume{}, "read mounts", err)
	}
	for key, point := range points {
		t, err := r.targets.root.Resolve(point)
		if err != nil {
			report.add(&volume.Volume{Key: key, Target: point}, "unmount stray guard", err)
			continue
		}
		v := r.targets.volume(t)
		r.removeUnknown(v, "unmount stray guard", report,
			func() error { return r.handlers.refuseBound(ctx, v) },
			func() error { return t.Remove(false) })
		t.Close()
	}
}

// removeUnknown removes what is left of a volume without a record, unless a sandbox may have the volume.
func (r *reconciler) removeUnknown(v *volume.Volume, action string, report *collector, refuse, remove func() error) {
	if err := refuse(); err != nil {
		report.add(v, action, err)
		return
	}
	unlock, free := r.locks.keys.TryLock(v.Key)
	if !free {
		return // a call works on it, and may hang; the next run checks again
	}
	defer unlock()
	if !r.table.has(v.Key) {
		report.add(v, action, remove())
	}
}
