package front

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

const (
	// maxRefusals bounds what is kept; those that were tried longest ago go first.
	maxRefusals = 1000
	// refusalKept is how long a refusal is kept after the last try. kubelet waits
	// for two minutes at most between two.
	refusalKept = 10 * time.Minute
)

// refusals are the volumes that pods wait for and that could not be deferred. They
// are kept in memory: kubelet tries again, and then it is known again.
type refusals struct {
	changed func(deferral.Key)

	mu  sync.Mutex
	all map[deferral.Key]*refused
}

// refused is one of them, with what will forget it.
type refused struct {
	deferral.Refusal
	expiry *time.Timer
}

func newRefusals(changed func(deferral.Key)) *refusals {
	if changed == nil {
		changed = func(deferral.Key) {}
	}
	return &refusals{changed: changed, all: make(map[deferral.Key]*refused)}
}

// note keeps a refusal. That of an earlier try is counted on.
func (r *refusals) note(one deferral.Refusal) {
	now := time.Now()
	one.First, one.Last, one.Count = now, now, 1
	dropped := r.put(one)
	if dropped != "" {
		r.changed(dropped)
	}
	r.changed(one.Key)
}

// put keeps a refusal, and tells which one had to go for it.
func (r *refusals) put(one deferral.Refusal) (dropped deferral.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if before := r.all[one.Key]; before != nil {
		one.First, one.Count = before.First, before.Count+1
		before.expiry.Stop()
	} else if len(r.all) >= maxRefusals {
		oldest := r.oldest()
		dropped = oldest.Key
		r.drop(oldest)
	}
	kept := &refused{Refusal: one}
	kept.expiry = time.AfterFunc(refusalKept, func() { r.expire(one.Key, kept) })
	r.all[one.Key] = kept
	return dropped
}

func (r *refusals) oldest() *refused {
	var oldest *refused
	for _, one := range r.all {
		if oldest == nil || one.Last.Before(oldest.Last) {
			oldest = one
		}
	}
	return oldest
}

func (r *refusals) drop(one *refused) {
	one.expiry.Stop()
	delete(r.all, one.Key)
}

// expire forgets a refusal unless the volume was tried again meanwhile.
func (r *refusals) expire(key deferral.Key, kept *refused) {
	r.mu.Lock()
	gone := r.all[key] == kept
	if gone {
		r.drop(kept)
	}
	r.mu.Unlock()
	if gone {
		r.changed(key)
	}
}

// forget drops the refusals that are meant.
func (r *refusals) forget(meant func(*deferral.Refusal) bool) {
	var gone []deferral.Key
	r.mu.Lock()
	for key, one := range r.all {
		if meant(&one.Refusal) {
			r.drop(one)
			gone = append(gone, key)
		}
	}
	r.mu.Unlock()
	for _, key := range gone {
		r.changed(key)
	}
}

func (r *refusals) none() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.all) == 0
}

func (r *refusals) list() []deferral.Refusal {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]deferral.Refusal, 0, len(r.all))
	for _, one := range r.all {
		out = append(out, one.Refusal)
	}
	slices.SortFunc(out, func(a, b deferral.Refusal) int { return cmp.Compare(a.Target, b.Target) })
	return out
}

func (r *refusals) get(key deferral.Key) (deferral.Refusal, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	one := r.all[key]
	if one == nil {
		return deferral.Refusal{}, false
	}
	return one.Refusal, true
}

// Refused lists the volumes that pods wait for and that could not be deferred, by
// their targets.
func (f *Front) Refused() []deferral.Refusal { return f.refused.list() }

// Refusal gives one of them.
func (f *Front) Refusal(key deferral.Key) (deferral.Refusal, bool) { return f.refused.get(key) }

// forgetTarget forgets that a target was refused.
func (f *Front) forgetTarget(target string) {
	if f.refused.none() {
		return
	}
	key := f.key(target)
	f.refused.forget(func(r *deferral.Refusal) bool { return r.Key == key })
}

// key is the one under which a volume at this target would be on record.
func (f *Front) key(target string) deferral.Key {
	key, err := f.cfg.Volumes.KeyOfTarget(target)
	if err != nil {
		return deferral.KeyOf(target) // it lies elsewhere, and never will be on record
	}
	return key
}
