package refusal

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// maxRefusals bounds the list; the entry whose last try is oldest is evicted first.
	maxRefusals = 1000
	// refusalKept is how long a refusal is kept after the last try. kubelet waits for two minutes at most between two.
	refusalKept = 10 * time.Minute
)

// List holds the volumes that pods wait for and that could not be deferred. It is in
// memory only: after a restart kubelet retries each call, which lists the volume again.
type List struct {
	observer Observer

	mu  sync.Mutex
	all map[volume.Key]*entry
}

// entry is one refused volume. Its timer removes it.
type entry struct {
	Refusal
	expiry *time.Timer
}

// Observer is called for each refusal, and for each volume that is listed or removed. It must not block.
type Observer interface {
	Refused(*Refusal)
	Changed(key volume.Key)
}

// NewList makes an empty list.
func NewList(observer Observer) *List {
	return &List{observer: observer, all: make(map[volume.Key]*entry)}
}

// Add lists a refusal, or counts one more of a volume that is listed.
func (r *List) Add(one Refusal) {
	now := time.Now()
	one.First, one.Last, one.Count = now, now, 1
	if dropped := r.put(one); dropped != "" {
		r.observer.Changed(dropped)
	}
	r.observer.Changed(one.Key)
	r.observer.Refused(&one)
}

// put stores a refusal, and returns the key of the one that it evicted, if any.
func (r *List) put(one Refusal) (dropped volume.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if before := r.all[one.Key]; before != nil {
		one.First, one.Count = before.First, before.Count+1
		before.expiry.Stop()
	} else if len(r.all) >= maxRefusals {
		oldest := slices.MinFunc(slices.Collect(maps.Values(r.all)), func(a, b *entry) int { return a.Last.Compare(b.Last) })
		dropped = oldest.Key
		oldest.expiry.Stop()
		delete(r.all, dropped)
	}
	kept := &entry{Refusal: one}
	// If the volume is refused again meanwhile, another entry takes the place of this one.
	kept.expiry = time.AfterFunc(refusalKept, func() { r.remove(func(e *entry) bool { return e == kept }) })
	r.all[one.Key] = kept
	return dropped
}

// ForgetTarget removes the refusal of a publish or stage at a path.
func (r *List) ForgetTarget(path string) {
	r.remove(func(e *entry) bool { return e.Target == path })
}

// ForgetVolume removes all refusals of a volume.
func (r *List) ForgetVolume(driver, volumeID string) {
	volumeID = Clip(volumeID)
	r.remove(func(e *entry) bool { return e.Driver == driver && e.VolumeID == volumeID })
}

func (r *List) remove(match func(*entry) bool) {
	var gone []volume.Key
	r.mu.Lock()
	for key, one := range r.all {
		if match(one) {
			one.expiry.Stop()
			delete(r.all, key)
			gone = append(gone, key)
		}
	}
	r.mu.Unlock()
	for _, key := range gone {
		r.observer.Changed(key)
	}
}

// Refused lists the refusals, ordered by target.
func (r *List) Refused() []Refusal {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]Refusal, 0, len(r.all))
	for _, one := range r.all {
		out = append(out, one.Refusal)
	}
	slices.SortFunc(out, func(a, b Refusal) int { return cmp.Compare(a.Target, b.Target) })
	return out
}

// Refusal returns one of them.
func (r *List) Refusal(key volume.Key) (Refusal, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	one := r.all[key]
	if one == nil {
		return Refusal{}, false
	}
	return one.Refusal, true
}
