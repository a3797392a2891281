package deferral

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// table holds all volumes in memory.
type table struct {
	observer Observer

	mu      sync.RWMutex
	volumes map[volume.Key]*entry
	// lost and origins have volumes that a call would otherwise look for among all.
	lost    map[volume.Key]*entry
	origins map[origin][]*entry
	// ordered are all volumes by their targets, so that no page looks at all; it is nil until a list is asked for.
	ordered []*entry
	serving atomic.Bool // the first Reconcile has ended: calls may come
	// work is what is done to volumes by each. A volume that hangs is left behind.
	work sys.Looks[volume.Key]

	problems []error // of files among the records that are none
	keepAll  bool    // kept claims may belong to volumes that could not be listed
}

// entry is a volume in memory. It is never changed: replace puts a changed copy in its
// place, because readers hold it without a lock.
type entry struct {
	rec      *record
	removing bool
	problem  error // what is wrong with the volume, or nil
	since    time.Time
	// refusal is why the volume was not released when it was to be, or nil.
	refusal error
	// lost is set if the volume has no usable record, and says so with the cause, unread. File is that
	// record; rec is made of what else is known, and never written.
	lost, unread error
	file         string
}

// origin is a volume of a driver.
type origin struct{ driver, id string }

func newTable(observer Observer) *table {
	return &table{
		observer: observer, volumes: make(map[volume.Key]*entry), lost: make(map[volume.Key]*entry), origins: make(map[origin][]*entry),
		work: sys.Looks[volume.Key]{Time: leaveTime, Most: maxLeft, Changed: observer.Changed},
	}
}

func (t *table) get(key volume.Key) *entry {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.volumes[key]
}

// has reports whether a volume exists, with a usable record or without.
func (t *table) has(key volume.Key) bool { return t.get(key) != nil }

// enter adds a volume at the start, and notifies nobody.
func (t *table) enter(e *entry) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.put(e)
}

// put puts a volume in the place of the one before, if there is one. The caller has the lock.
func (t *table) put(e *entry) {
	key := e.rec.Key
	t.drop(key)
	t.volumes[key] = e
	if t.ordered != nil {
		at, _ := t.position(e.rec.Target, key)
		t.ordered = slices.Insert(t.ordered, at, e)
	}
	if e.lost != nil {
		t.lost[key] = e
	}
	if from := e.rec.Origin; from != nil {
		of := origin{e.rec.Driver, from.VolumeID}
		t.origins[of] = append(t.origins[of], e)
	}
}

func (t *table) drop(key volume.Key) {
	old := t.volumes[key]
	delete(t.volumes, key)
	delete(t.lost, key)
	if old == nil {
		return
	}
	if at, found := t.position(old.rec.Target, key); found {
		t.ordered = slices.Delete(t.ordered, at, at+1)
	}
	if old.rec.Origin == nil {
		return
	}
	of := origin{old.rec.Driver, old.rec.Origin.VolumeID}
	rest := slices.DeleteFunc(t.origins[of], func(e *entry) bool { return e == old })
	if t.origins[of] = rest; len(rest) == 0 {
		delete(t.origins, of)
	}
}

func (t *table) add(rec *record) {
	t.enter(&entry{rec: rec})
	t.observer.Changed(rec.Key)
}

func (t *table) remove(key volume.Key) {
	t.mu.Lock()
	t.drop(key)
	t.mu.Unlock()
	t.observer.Changed(key)
}

func (t *table) replace(key volume.Key, change func(*entry)) {
	t.mu.Lock()
	old, ok := t.volumes[key]
	if ok {
		next := *old
		change(&next)
		t.put(&next)
	}
	t.mu.Unlock()
	if ok {
		t.observer.Changed(key)
	}
}

func (t *table) markRemoving(key volume.Key, problem error) {
	t.replace(key, func(e *entry) {
		e.removing, e.refusal = true, nil
		e.setProblem(problem)
	})
}

func (t *table) setProblem(key volume.Key, problem error) {
	if known := t.get(key); known == nil || (known.problem == nil && problem == nil) {
		return
	}
	t.replace(key, func(e *entry) { e.setProblem(problem) })
}

func (e *entry) setProblem(problem error) {
	if problem != nil && e.problem == nil {
		e.since = time.Now()
	}
	e.problem = problem
}

// setRefusal records why the release of a volume was refused. nil means that it is published again.
func (t *table) setRefusal(key volume.Key, refusal error) {
	if known := t.get(key); known == nil || known.removing || known.refusal == nil && refusal == nil {
		return
	}
	t.replace(key, func(e *entry) {
		if e.refusal == nil {
			e.since = time.Now()
		}
		e.refusal = refusal
	})
}

func (t *table) status(e *entry, held *claim.Held) Status {
	out := Status{
		Volume: &e.rec.Volume, Removing: e.removing, Leaving: e.refusal != nil,
		Problem: cmp.Or(e.problem, e.refusal), ProblemSince: e.since, Held: held,
	}
	if since, hangs := t.work.Hangs(e.rec.Key); hangs {
		out.Problem, out.ProblemSince = hangError(e, since), since
	}
	return out
}

// refuseHung returns an error while a volume is left behind: who waited for it would hang too.
func (t *table) refuseHung(key volume.Key) error {
	if since, hangs := t.work.Hangs(key); hangs {
		if known := t.get(key); known != nil {
			return hangError(known, since)
		}
	}
	return nil
}

// notFinal returns the error of a call as one to retry while the volume on its target is on record or may be.
func (t *table) notFinal(target string, keyOf func(target string) (volume.Key, error), err error) error {
	switch volume.KindOf(err) {
	case volume.Busy, volume.Timeout, volume.Canceled, volume.Exhausted, volume.NoSandbox, volume.Conflict:
		return err
	}
	switch key, unknown := keyOf(target); {
	case t.has(key):
		return volume.Errorf(volume.Busy, "%w; the volume stays as an earlier call has left it", err)
	case unknown != nil && volume.KindOf(unknown) != volume.Invalid:
		return volume.Errorf(volume.Busy, "%w; it is not known whether an earlier call has left the volume", err)
	}
	return err
}

func hangError(e *entry, since time.Time) error {
	return volume.Errorf(volume.Busy, "volume %s: its device %s or its runtime has not answered since %s: nothing of it is changed until it does, "+
		"and nobody else gets the device: see whether the server of the device answers", e.rec.Target, e.rec.Device.Path, since.UTC().Format(time.RFC3339))
}

// after returns the first volumes behind a target and key, in order.
func (t *table) after(target string, key volume.Key, most int) []*entry {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ordered == nil {
		t.ordered = slices.SortedFunc(maps.Values(t.volumes), func(x, y *entry) int { return x.compare(y.rec.Target, y.rec.Key) })
	}
	at, found := t.position(target, key)
	if found {
		at++
	}
	return slices.Clone(t.ordered[at:min(len(t.ordered), at+most)])
}

// movedFrom returns the volume that was published at a target while that led to another key, or nil.
func movedFrom(t *table, target string, key volume.Key) *entry {
	for _, e := range t.after(target, "", 1) {
		if e.rec.Key != key && e.rec.Target == target && e.rec.ResolvedTarget != "" && !t.has(key) {
			return e
		}
	}
	return nil
}

// position needs the lock.
func (t *table) position(target string, key volume.Key) (at int, found bool) {
	return slices.BinarySearchFunc(t.ordered, key, func(e *entry, key volume.Key) int { return e.compare(target, key) })
}

func (e *entry) compare(target string, key volume.Key) int {
	return cmp.Or(strings.Compare(e.rec.Target, target), strings.Compare(string(e.rec.Key), string(key)))
}

func (t *table) all() []*entry { return t.after("", "", math.MaxInt32) }

func (t *table) where(is func(*entry) bool) (out []*entry) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, known := range t.volumes {
		if is(known) {
			out = append(out, known)
		}
	}
	return out
}

func (t *table) allLost() []*entry {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return slices.Collect(maps.Values(t.lost))
}

func (t *table) ofOrigin(of origin) []*entry {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return slices.Clone(t.origins[of])
}

// left returns the volumes that are left behind.
func (t *table) left() []*entry {
	return t.where(func(e *entry) bool {
		_, hangs := t.work.Hangs(e.rec.Key)
		return hangs
	})
}

func (t *table) setLoadProblems(problems []error, keepAll bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.problems, t.keepAll = problems, keepAll
}

func (t *table) allProblems() []error {
	t.mu.RLock()
	out := slices.Clone(t.problems)
	t.mu.RUnlock()
	for _, known := range t.allLost() {
		out = append(out, known.lost)
	}
	return out
}

// claimed returns the devices whose kept descriptors are still needed. Not ok means all:
// the device of a lost volume may be any.
func (t *table) claimed() (devices []volume.Device, ok bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	ok = !t.keepAll
	for _, known := range t.volumes {
		ok = ok && (known.lost == nil || known.rec.Device.Kind != "" || known.rec.HostMounts)
		if !known.rec.HostMounts {
			devices = append(devices, known.rec.Device)
		}
	}
	return devices, ok
}
