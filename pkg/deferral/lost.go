package deferral

import (
	"cmp"
	"context"
	"errors"
	"io/fs"

	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// errNoRecord is the cause for a volume that has only a guard or a projection.
var errNoRecord = errors.New("there is no such file")

// lostVolumes handles the volumes that have no usable record: the file is damaged, was written by a newer daemon,
// cannot be read at the moment, or is gone although there is a projection or a guard. A sandbox may have such a volume,
// so its claim, guard and projection stay until it is released or its record can be read again.
type lostVolumes struct {
	boot     string
	targets  *targets
	store    *store
	claims   *claim.Table
	locks    *volumeLocks
	handlers *handlerSet
	table    *table
	remover  *remover
}

// enter adds the lost volumes to the table at the start. After an error there may be more.
func (l *lostVolumes) enter(ctx context.Context, files []unusable) error {
	standing, err := l.standing(ctx)
	for _, file := range files {
		rec := cmp.Or(file.hint, standing[file.key])
		if rec == nil {
			rec = l.record(&volume.Volume{Key: file.key})
		}
		delete(standing, file.key)
		l.enterOne(rec, file.dir, file.err)
	}
	for _, rec := range standing {
		l.enterOne(rec, volumesDir, errNoRecord)
	}
	return err
}

func (l *lostVolumes) enterOne(rec *record, dir string, unread error) {
	e := &entry{rec: rec, removing: dir == removingDir, file: l.store.path(dir, rec.Key), unread: unread}
	e.lost = e.cause(notClaimed)
	l.table.enter(e)
}

// standing returns what is known of volumes with a projection or a guard that are not in the table.
func (l *lostVolumes) standing(ctx context.Context) (map[volume.Key]*record, error) {
	out := make(map[volume.Key]*record)
	points, err := l.targets.root.Points(ctx, l.table.has)
	for key, point := range points {
		if t, err := l.targets.root.Resolve(point); err == nil {
			out[key] = l.record(l.targets.volume(t))
			t.Close()
		}
	}
	for _, handler := range l.handlers.byName {
		orphans, listErr := handler.Orphans(l.table.has)
		err = errors.Join(err, listErr)
		for _, v := range orphans {
			known := *v
			known.Handler = handler.Name()
			out[v.Key] = l.record(&known)
		}
	}
	return out, err
}

// record makes a record in memory from what is known of a volume without one. Its removal
// leaves the device's read-only flag as it is: it is not known any more whether we set it.
func (l *lostVolumes) record(v *volume.Volume) *record {
	v.Target = cmp.Or(v.Target, "(unknown target, id "+v.Key.Short()+")")
	return &record{
		Version: recordVersion, Boot: l.boot, Volume: *v, HostMounts: l.handlers.abilities(v.Handler).HostMounts,
		DeviceWasReadOnly: true,
	}
}

const notClaimed = "is not claimed"

func (e *entry) cause(device string) error {
	return volume.Errorf(volume.Busy, "volume %s: %w", e.rec.Target, &lostError{e.file, device, e.unread})
}

// lostError is part of the error for a volume without a usable record.
type lostError struct {
	record, device string
	cause          error
}

func (e *lostError) Error() string {
	return "its record " + e.record + " cannot be used, so nothing of it is removed, and its device " + e.device + ": " + e.cause.Error()
}

func (e *lostError) Unwrap() []error { return []error{claim.ErrLost, e.cause} }

// reclaim claims a volume's device again. It updates the error of a lost volume, which says whether it is claimed.
func (l *lostVolumes) reclaim(ctx context.Context, known *entry) error {
	if known.lost == nil {
		return l.claims.Reclaim(ctx, known.rec.claim())
	}
	device, err := known.rec.Device.Path+" stays claimed", error(nil)
	if known.rec.Device.Kind == "" {
		device = "is not known: only a claim that systemd kept can protect it"
	} else if err = l.claims.Reclaim(ctx, known.rec.claim()); err != nil {
		device = known.rec.Device.Path + " " + notClaimed
	}
	lost := known.cause(device)
	l.table.replace(known.rec.Key, func(e *entry) { e.lost = lost })
	return errors.Join(lost, err)
}

// ofTarget returns the volume of a target, whose lock the caller has. If its record was unusable, it is read again. The
// error is that of a record which only reconcile can use, or of a removal that nothing may end.
func (l *lostVolumes) ofTarget(ctx context.Context, t *guard.Target) (*entry, error) {
	known := l.table.get(t.Key)
	if known == nil || known.lost == nil {
		return known, nil
	}
	rec, err := readRecord(known.file)
	switch {
	case err == nil && isElsewhere(known, rec):
		return known, volume.Errorf(volume.Busy, "volume %s: its record was lost, and can be read again: it is of the device %s, and %s was "+
			"claimed for it, which has to be free first: repeat", known.rec.Target, rec.Device.Path, known.rec.Device.Path)
	case err == nil:
		l.found(rec)
		if rec.Boot == l.boot {
			_ = l.claims.Reclaim(ctx, rec.claim()) // else a claim that was kept stays in the way of the call
		}
	case l.mustStay(known, err):
		return known, known.lost
	case known.rec.ResolvedTarget == "":
		l.table.replace(t.Key, func(e *entry) { e.rec = l.record(l.targets.volume(t)) })
	}
	return l.table.get(t.Key), nil
}

// ofFreeTarget is ofTarget for who has no lock.
func (l *lostVolumes) ofFreeTarget(ctx context.Context, t *guard.Target) (*entry, error) {
	known, hung := l.table.get(t.Key), l.table.refuseHung(t.Key)
	if known == nil || known.lost == nil || hung != nil {
		return known, hung
	}
	unlock, err := l.locks.lock(ctx, t.Key)
	if err != nil {
		return known, err
	}
	defer unlock()
	return l.ofTarget(ctx, t)
}

// mustStay reports whether a removal that was begun may be ended by force alone, because its record cannot be read: a
// sandbox may have the device, and which one that is, or what else a newer daemon did with it, is not known.
func (l *lostVolumes) mustStay(known *entry, unread error) bool {
	return known.removing && known.rec.Boot == l.boot && !errors.Is(unread, fs.ErrNotExist) &&
		(known.rec.Device.Kind == "" || errors.Is(unread, errNewerRecord))
}

// isElsewhere reports whether the device that was assumed for a lost volume differs from the one in its record.
func isElsewhere(known *entry, rec *record) bool {
	return known.rec.Device.Kind != "" && !known.rec.Device.Same(rec.Device)
}

func (l *lostVolumes) found(rec *record) {
	l.table.replace(rec.Key, func(e *entry) { *e = entry{rec: rec, removing: e.removing || rec.Boot != l.boot} })
}

// reconcile reads a lost volume's record again, and reports whether reconciler goes on with the volume. If
// there is no file and no sandbox has the volume, reconcile removes what is left of it.
func (l *lostVolumes) reconcile(ctx context.Context, known *entry, report *collector) (goOn bool) {
	key := known.rec.Key
	rec, err := readRecord(known.file)
	gone := errors.Is(err, fs.ErrNotExist)
	if err != nil && !gone && known.removing && !l.mustStay(known, err) {
		return true // its device is known, and undo asks the kernel who has it
	}
	if gone || err == nil && isElsewhere(known, rec) {
		err = l.remover.refuseUsed(ctx, known.rec)
	}
	unlock, lockErr := l.locks.lock(ctx, key)
	if lockErr != nil {
		return false
	}
	defer unlock()
	if known = l.table.get(key); known == nil || known.lost == nil {
		return known != nil
	}
	switch {
	case gone && err == nil:
		report.add(&known.rec.Volume, "retract orphan", l.remover.undo(ctx, known.rec, nil, false))
		return false
	case err == nil:
		if err = l.useRecord(ctx, known, rec); err == nil {
			report.add(&known.rec.Volume, "read record", nil)
			return true
		}
	}
	err = errors.Join(l.reclaim(ctx, known), err)
	report.add(&known.rec.Volume, "read record", err)
	l.table.setProblem(key, err)
	return false
}

// useRecord continues with the record of a volume that was lost. A claim on the device in the
// record stays. A claim on another device is released first, as at the end of a volume.
func (l *lostVolumes) useRecord(ctx context.Context, known *entry, rec *record) error {
	if isElsewhere(known, rec) {
		err := l.claims.Release(known.rec.claim(), func(last bool) error {
			if !last {
				return nil
			}
			return l.remover.refuseHeld(ctx, known.rec)
		})
		if err != nil {
			return err
		}
	}
	l.found(rec)
	if known.removing && rec.Boot == l.boot {
		_ = l.claims.Reclaim(ctx, rec.claim()) // as at the start: undo asks the kernel who has the device
	}
	return nil
}

// dropKept gives up kept descriptors that belong to no volume. While the device of a lost volume is not known, each of
// them may be that device.
func (l *lostVolumes) dropKept(ctx context.Context) {
	if devices, ok := l.table.claimed(); ok {
		l.claims.DropKept(ctx, devices)
	}
}
