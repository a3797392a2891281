package deferral

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Orphan is a process that has the device of a volume open and belongs to a sandbox that the container
// runtime does not know any more, such as a VMM that outlived its shim. Nothing else on the node ends it
// while the volume is not released.
type Orphan struct {
	PID                            int
	Program, ControlGroup, Sandbox string
	// Why says how the process names its sandbox.
	Why string
	// Since is when the device was first found to be held, or zero.
	Since time.Time
}

// orphanTime is how long a device must be held before an orphan is ended. A VM that is ending needs less.
const orphanTime = 10 * time.Second

// orphans finds and ends orphans. A process is an orphan if all of these are true; one that names no
// sandbox of the volume never is:
//   - The kernel says that it has this very device open.
//   - Its control groups or arguments name a sandbox that is known to have had this volume, or its
//     control group is that of the volume's user and names a sandbox.
//   - The container runtime, asked twice, lists none of the sandboxes that it names.
type orphans struct {
	boot     string
	claims   *claim.Table
	users    *claim.Users
	handlers *handlerSet
	table    *table
	// auto is set if a release ends the orphans that block it.
	auto     bool
	patience time.Duration // with those that were killed
	observer Observer
}

// find lists the orphans of a volume, or says why there are none.
func (o *orphans) find(ctx context.Context, rec *record) (found []Orphan, handler Tracking, err error) {
	handler, able := o.handlers.tracking(&rec.Volume)
	switch {
	case !able:
		return nil, nil, volume.Errorf(volume.Unsupported, "volume %s: its runtime handler cannot tell which sandboxes have ended: end the sandbox (crictl stopp, ctr task rm), or its processes by hand", rec.Target)
	case o.claims.IsShared(rec.Device):
		return nil, nil, volume.Errorf(volume.Unsupported, "volume %s: other volumes share its device, so it is not known which volume a process uses: "+
			"end the processes by hand", rec.Target)
	}
	named, err := o.named(ctx, rec, handler)
	if err != nil {
		return nil, nil, err
	}
	for _, one := range named[:min(maxOrphans, len(named))] {
		if disowned := handler.Disowned(ctx, &rec.Volume, one.ids); disowned != nil {
			err = disowned
			continue
		}
		found = append(found, one.Orphan)
	}
	if len(found) > 0 {
		return found, handler, nil
	}
	return nil, nil, err
}

// maxOrphans bounds how many processes the container runtime is asked about at a time.
const maxOrphans = 8

// candidate is an orphan if the container runtime lists none of the ids.
type candidate struct {
	Orphan
	ids []string
}

// ask lists the processes that have the device and name a sandbox of the volume, and the others. With an error they may
// not be all.
func (o *orphans) ask(ctx context.Context, rec *record, handler Tracking) (found []candidate, others []string, err error) {
	holders, err := o.claims.OpenHolders(ctx, rec.claim())
	known := handler.Sandboxes(&rec.Volume)
	for _, p := range holders {
		one := examine(p, &rec.Volume, known)
		p.Close()
		if one.Sandbox == "" {
			others = append(others, p.String())
			continue
		}
		if held := o.users.Get(rec.Key); held != nil {
			one.Since = held.Since
		}
		found = append(found, one)
	}
	return found, others, err
}

// named lists the processes that have the device and name a sandbox of the volume.
func (o *orphans) named(ctx context.Context, rec *record, handler Tracking) (found []candidate, err error) {
	found, others, err := o.ask(ctx, rec, handler)
	switch {
	case len(found) > 0:
		return found, nil
	case ctx.Err() != nil:
		return nil, volume.Errorf(volume.Busy, "volume %s: there was no time to find out who has its device %s open: repeat", rec.Target, rec.Device.Path)
	case err != nil:
		return nil, volume.Errorf(volume.Busy, "volume %s: what has its device %s open %w: if that is the VM of a sandbox that has ended, `kill -9` it on the node",
			rec.Target, rec.Device.Path, fmt.Errorf("%w: %w", errCannotEnd, err))
	case len(others) > 0:
		return nil, volume.Errorf(volume.Unsupported, "volume %s: its device %s is open in %s, which names no sandbox of this volume, so it may be anything: "+
			"find out what it is, and end it by hand", rec.Target, rec.Device.Path, strings.Join(others, ", "))
	}
	return nil, volume.Errorf(volume.NotFound, "volume %s: no process has its device %s open: if the volume is not released, `crustctl get` says why", rec.Target, rec.Device.Path)
}

// examine reads what a process names. Its sandbox is "" if it names none of the volume's.
func examine(p *openers.Process, v *volume.Volume, known []string) candidate {
	groups, args := p.InGroups(), p.InArguments()
	one := candidate{ids: slices.Concat(groups, args)}
	one.PID, one.Program, one.ControlGroup = p.PID, p.Program, p.Path
	isKnown := func(id string) bool { return slices.Contains(known, id) }
	if at := slices.IndexFunc(groups, isKnown); at >= 0 {
		one.Sandbox, one.Why = groups[at], "its control group is that of the sandbox"
	} else if at := slices.IndexFunc(args, isKnown); at >= 0 {
		one.Sandbox, one.Why = args[at], "its command line names the sandbox"
	} else if len(groups) > 0 && p.IsOfPod(v.PodUID) {
		// That may be the id of a container: none of the volume's sandboxes may be alive either.
		one.Sandbox, one.Why = groups[0], "its control group is that of a sandbox of the volume's user"
		one.ids = slices.Concat(one.ids, known)
	}
	return one
}

// end kills the orphans of a volume with these process ids (nil: all of them) for somebody, waits until no process
// has the device open, and returns the orphans that it has killed. A volume that is in use stays so.
func (o *orphans) end(ctx context.Context, rec *record, pids []int, by string) (killed []Orphan, err error) {
	found, handler, err := o.find(ctx, rec)
	if errors.Is(err, errCannotEnd) {
		o.observer.OrphanEnded(&rec.Volume, Orphan{}, by, err)
	}
	if err != nil {
		return nil, err
	}
	var processes []*openers.Process // of those that were killed
	defer func() { closeAll(processes) }()
	for _, one := range found {
		if pids != nil && !slices.Contains(pids, one.PID) {
			continue
		}
		process, failed := o.kill(ctx, rec, handler, one)
		if err = failed; errors.Is(err, errCannotEnd) {
			o.observer.OrphanEnded(&rec.Volume, one, by, err)
		}
		if err != nil {
			break
		}
		killed, processes = append(killed, one), append(processes, process)
	}
	if len(killed) == 0 {
		return nil, cmp.Or(err, volume.Errorf(volume.NotFound, "volume %s: the process has ended, or is not an orphan any more: repeat", rec.Target))
	}
	held := o.awaitEnd(context.WithoutCancel(ctx), rec, processes)
	for i, one := range killed {
		survived := survival(processes[i], held)
		o.observer.OrphanEnded(&rec.Volume, one, by, survived)
		err = cmp.Or(err, survived)
	}
	if known := o.table.get(rec.Key); held != nil && known != nil && !known.removing && known.refusal == nil {
		o.users.Drop(rec.Key) // a sandbox that is to have the volume has it
		held = nil
	}
	return killed, cmp.Or(err, held)
}

// survival returns the error for a process that was killed and may still have the device. held is that of RefuseUsed.
func survival(killed *openers.Process, held error) error {
	if held == nil || killed.Ended() {
		return nil // another process has it
	}
	return fmt.Errorf("it was killed and has not ended in %v, as where its storage does not answer: restore that, or reboot the node: %w", claim.EndTime, held)
}

// awaitEnd waits until nobody has the device, or those that were killed have ended: the next sandbox may have it then.
// It returns the error of RefuseUsed.
func (o *orphans) awaitEnd(ctx context.Context, rec *record, killed []*openers.Process) (held error) {
	waiting, cancel := context.WithTimeout(ctx, o.patience)
	defer cancel()
	for pause := 50 * time.Millisecond; ; pause *= 2 {
		ended := !slices.ContainsFunc(killed, func(p *openers.Process) bool { return !p.Ended() })
		held = o.claims.RefuseUsed(ctx, rec.claim(), 0)
		if held == nil || ended || !sys.Sleep(waiting, pause) {
			return held
		}
	}
}

// killTime is what the two scans of kill have at least.
const killTime = 2 * claim.ReleaseTime

// kill ends one orphan. Another process may have got its id meanwhile. So kill opens a pidfd first, and
// then checks again that the process is an orphan. The time of its caller may have been used up by the search.
func (o *orphans) kill(ctx context.Context, rec *record, handler Tracking, one Orphan) (*openers.Process, error) {
	if until, has := ctx.Deadline(); ctx.Err() != nil || has && time.Until(until) < killTime {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), killTime)
		defer cancel()
	}
	holders, err := o.claims.OpenHolders(ctx, rec.claim())
	defer func() { closeAll(holders) }()
	at := slices.IndexFunc(holders, func(p *openers.Process) bool { return p.PID == one.PID })
	again, _, askErr := o.ask(ctx, rec, handler)
	if at < 0 || !slices.ContainsFunc(again, func(c candidate) bool { return c.PID == one.PID && c.Sandbox == one.Sandbox }) {
		return nil, volume.Errorf(volume.Busy, "volume %s: process %d: %w: repeat", rec.Target, one.PID, cmp.Or(errors.Join(err, askErr), errNotHeld))
	}
	if err := holders[at].Kill(); err != nil {
		return nil, volume.Errorf(volume.Busy, "volume %s: process %d of sandbox %s, which the container runtime does not know any more, has its device %s open, "+
			"and %w: `kill -9 %d` on the node", rec.Target, one.PID, one.Sandbox, rec.Device.Path, fmt.Errorf("%w: %w", errCannotEnd, err), one.PID)
	}
	process := holders[at]
	holders = slices.Delete(holders, at, at+1)
	return process, nil
}

func closeAll(processes []*openers.Process) {
	for _, p := range processes {
		p.Close()
	}
}

var (
	errNotHeld   = errors.New("it has ended, or does not have the device open any more")
	errCannotEnd = errors.New("cannot be ended by crust-proxy")
)

// clear ends the orphans that block the release of a volume. cause is the error of refuseUsed. It returns
// the error that still blocks the release.
func (o *orphans) clear(ctx context.Context, rec *record, cause error) error {
	by, isHeld := errors.AsType[*claim.HeldError](cause)
	held := o.users.Get(rec.Key)
	if !o.auto || !isHeld || by.By.Kernel || held == nil || time.Since(held.Since) < orphanTime || rec.PodUID == "" || rec.Boot != o.boot {
		return cause
	}
	killed, err := o.end(ctx, rec, nil, "crust-proxy")
	switch {
	case errors.Is(err, errCannotEnd) && len(killed) == 0:
		return fmt.Errorf("%s; %w", cause.Error(), err) // not wrapped: nobody is to be told that crust-proxy can end it
	case len(killed) > 0: // others may have it
		return cmp.Or(err, o.claims.RefuseUsed(ctx, rec.claim(), 0))
	}
	return cause // it is no orphan, or not known to be one
}

// lookTime bounds a look by reconcile, which holds the volume's lock.
const lookTime = 3 * time.Second

// orphanError is part of the problem of a volume that orphans have beside the sandbox that came after theirs.
type orphanError struct {
	text  string
	pids  []int
	since time.Time // zero if the last look could not tell
}

func (e *orphanError) Error() string { return e.text }

func (e *entry) hasOrphans() bool {
	_, is := errors.AsType[*orphanError](e.problem)
	return is
}

// look fails if a volume in use has orphans. Its user may get another sandbox without a release that would end them, and
// two VMs then have one disk.
func (o *orphans) look(ctx context.Context, known *entry) error {
	rec := known.rec
	handler, able := o.handlers.tracking(&rec.Volume)
	if !able || rec.PodUID == "" || !handler.Several(&rec.Volume) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	before, shown := errors.AsType[*orphanError](known.problem)
	found, _, err := o.find(ctx, rec)
	if err != nil {
		// The VM of the other sandbox has the device, or it is not known who has.
		now, others, err := o.ask(ctx, rec, handler)
		if err == nil && len(now)+len(others) > 0 {
			handler.ForgetEnded(&rec.Volume, func(id string) bool {
				return slices.ContainsFunc(now, func(c candidate) bool { return slices.Contains(c.ids, id) })
			})
		}
		if shown && (err != nil || slices.ContainsFunc(now, func(c candidate) bool { return slices.Contains(before.pids, c.PID) })) {
			return volume.Errorf(volume.Busy, "%w", &orphanError{text: before.text, pids: before.pids}) // it may still be one
		}
		if ctx.Err() != nil {
			return volume.Errorf(volume.Busy, "volume %s: it could not be found out in %v whether a VM of an earlier sandbox has its device %s open "+
				"beside the sandbox that came after it: see whether the container runtime answers", rec.Target, lookTime, rec.Device.Path)
		}
		return nil
	}
	now := &orphanError{since: time.Now(), text: fmt.Sprintf("volume %s: process %d (%q) of sandbox %s, which the container runtime does not know any more, "+
		"has its device %s open beside the sandbox that came after it: `crustctl end` ends it",
		rec.Target, found[0].PID, found[0].Program, found[0].Sandbox, rec.Device.Path)}
	now.pids = sys.Map(found, func(one Orphan) int { return one.PID })
	slices.Sort(now.pids)
	if shown && !before.since.IsZero() && slices.Equal(before.pids, now.pids) {
		now = before
	}
	return volume.Errorf(volume.Busy, "%w", now)
}

// seen are the volumes with orphans that look has found twice in turn, orphanTime apart.
func (o *orphans) seen() []*entry {
	return o.table.where(func(e *entry) bool {
		seen, is := errors.AsType[*orphanError](e.problem)
		return is && o.auto && !e.removing && !seen.since.IsZero() && time.Since(seen.since) >= orphanTime
	})
}

// endSeen ends those orphans, and reports whether one was killed.
func (o *orphans) endSeen(ctx context.Context, known *entry) bool {
	seen, is := errors.AsType[*orphanError](known.problem)
	if !is {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	killed, _ := o.end(ctx, known.rec, seen.pids, "crust-proxy") // an error is with the observer
	return len(killed) > 0
}

// Orphans lists the orphans that have the device of a volume open. If there are none, the error says why.
func (u Users) Orphans(ctx context.Context, key volume.Key) ([]Orphan, error) {
	rec, err := u.orphans.record(key)
	if err != nil {
		return nil, err
	}
	found, _, err := u.orphans.find(ctx, rec)
	return found, err
}

// EndOrphans ends the orphans of a volume with these process ids. The observer is told by whom.
func (u Users) EndOrphans(ctx context.Context, key volume.Key, pids []int, by string) ([]Orphan, error) {
	rec, err := u.orphans.record(key)
	if err != nil {
		return nil, err
	}
	return u.orphans.end(ctx, rec, pids, by)
}

// record is the record of a volume, or of one that is known only because its device is held.
func (o *orphans) record(key volume.Key) (*record, error) {
	if known := o.table.get(key); known != nil {
		return known.rec, nil
	}
	if held := o.users.Get(key); held != nil {
		return &record{Boot: o.boot, Volume: *held.Volume}, nil
	}
	return nil, volume.Errorf(volume.NotFound, "volume %s is not on record: it keeps no process", key.Short())
}

// HeldOf returns the volumes of one volume of a driver that were released by force, and whose devices
// somebody still has open: it asks again.
func (u Users) HeldOf(ctx context.Context, driver, volumeID string) (out []Status) {
	isIt := func(v *volume.Volume) bool {
		return v.Origin != nil && v.Driver == driver && v.Origin.VolumeID == volumeID
	}
	if u.of == nil || !slices.ContainsFunc(u.of.Forced(), func(h claim.Held) bool { return isIt(h.Volume) }) {
		return nil
	}
	u.orphans.claims.Refresh(ctx, isIt)
	for _, h := range u.of.Forced() {
		if isIt(h.Volume) {
			out = append(out, HeldStatus(h))
		}
	}
	return out
}
