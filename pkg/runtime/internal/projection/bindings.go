package projection

import (
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Binding is the sandbox that is asked about a volume.
type Binding struct {
	runtime.Binding
	// Unproven is set while nobody has confirmed that the sandbox has the volume, or
	// after the sandbox denied it. Such a sandbox is asked, but not reported.
	Unproven bool
}

func (b Binding) shown() string {
	if b.Unproven {
		return ""
	}
	return b.Sandbox
}

// Bindings holds in memory what is known of each volume: who published it, and the sandbox
// that has it. A volume that is not tracked cannot be bound.
type Bindings struct {
	onChange func(volume.Key) // may be nil

	mu      sync.RWMutex
	entries map[volume.Key]*Entry
	foreign map[volume.Key]*Entry // those of them that others own
}

// Entry is a volume that is tracked.
type Entry struct {
	// Volume must not be changed.
	Volume *volume.Volume
	// Owner is who published its directory, and Dir the name of that, if it is not ours.
	Owner Owner
	Dir   string
	// right are the stamps of what is ours, when it was looked at and was right.
	right  stamps
	looked time.Time
	// Live is the sandbox to ask about it, proven or not; its id is "" for none.
	Live Binding
}

func newBindings(onChange func(volume.Key)) *Bindings {
	return &Bindings{onChange: onChange, entries: make(map[volume.Key]*Entry), foreign: make(map[volume.Key]*Entry)}
}

// Track adds a volume, or replaces its entry. It keeps the binding.
func (b *Bindings) Track(tracked Entry) {
	key := tracked.Volume.Key
	b.mu.Lock()
	defer b.mu.Unlock()
	if before, ok := b.entries[key]; ok {
		tracked.Live = before.Live
	}
	b.entries[key] = &tracked
	delete(b.foreign, key)
	if tracked.Owner == Foreign {
		b.foreign[key] = &tracked
	}
}

// setRight records the stamps with which what is ours was right.
func (b *Bindings) setRight(v *volume.Volume, right stamps) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e, ok := b.entries[v.Key]; ok && e.Volume == v {
		e.right, e.looked = right, time.Now()
	}
}

// Forget removes a volume.
func (b *Bindings) Forget(key volume.Key) {
	b.mu.Lock()
	e, ok := b.entries[key]
	delete(b.entries, key)
	delete(b.foreign, key)
	b.mu.Unlock()
	if ok && (e.Live.Sandbox != "" || e.Owner == Foreign) {
		b.changed(key)
	}
}

// Get returns a tracked volume.
func (b *Bindings) Get(key volume.Key) (Entry, bool) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if e, ok := b.entries[key]; ok {
		return *e, true
	}
	return Entry{}, false
}

// IsOurs reports whether a volume is tracked and was published by us.
func (b *Bindings) IsOurs(key volume.Key) bool {
	e, _ := b.Get(key)
	return e.Owner == OwnedByUs
}

// Shown returns the sandbox that is known to have a volume.
func (b *Bindings) Shown(key volume.Key) (runtime.Binding, bool) {
	e, _ := b.Get(key)
	if e.Live.shown() == "" {
		return runtime.Binding{}, false
	}
	return e.Live.Binding, true
}

// Bind records that a sandbox has the volume.
func (b *Bindings) Bind(key volume.Key, sandbox, kind string) {
	b.update(key, func(live Binding) Binding {
		if live.shown() == sandbox {
			return live
		}
		return newBinding(sandbox, kind, false)
	})
}

// Propose records the sandbox to ask from now on, which may not have the volume.
func (b *Bindings) Propose(key volume.Key, sandbox, kind string) {
	b.update(key, func(live Binding) Binding {
		if live.Sandbox == sandbox && live.Runtime == kind {
			return live
		}
		return newBinding(sandbox, kind, true)
	})
}

// Unbind records that no sandbox has the volume, unless one other than from was bound meanwhile.
func (b *Bindings) Unbind(key volume.Key, from string) {
	b.update(key, func(live Binding) Binding {
		if live.Sandbox != from {
			return live
		}
		return Binding{}
	})
}

// Prove records that the sandbox which was asked has the volume, or denied it.
func (b *Bindings) Prove(key volume.Key, sandbox string, has bool) {
	b.update(key, func(live Binding) Binding {
		if live.Sandbox == sandbox && live.Unproven == has {
			live.Unproven, live.Since = !has, time.Now()
		}
		return live
	})
}

func newBinding(sandbox, kind string, unproven bool) Binding {
	return Binding{Binding: runtime.Binding{Sandbox: sandbox, Runtime: kind, Since: time.Now()}, Unproven: unproven}
}

func (b *Bindings) update(key volume.Key, next func(live Binding) Binding) {
	b.mu.Lock()
	changed := false
	if e, ok := b.entries[key]; ok {
		before := e.Live.shown()
		e.Live = next(e.Live)
		changed = e.Live.shown() != before
	}
	b.mu.Unlock()
	if changed {
		b.changed(key)
	}
}

// DropOthers unbinds the volumes of a pod from all sandboxes but one, which is new. It
// returns those of the pod's volumes that we published.
func (b *Bindings) DropOthers(podUID, sandbox string) (ours []volume.Key) {
	b.unbindAll(func(e *Entry) bool {
		if e.Volume.PodUID != podUID {
			return false
		}
		if e.Owner == OwnedByUs {
			ours = append(ours, e.Volume.Key)
		}
		return e.Live.Sandbox != sandbox
	})
	return ours
}

// DropSandbox unbinds all volumes of a sandbox that has ended and returns them.
func (b *Bindings) DropSandbox(sandbox string) []volume.Key {
	return b.unbindAll(func(e *Entry) bool { return e.Live.Sandbox == sandbox })
}

func (b *Bindings) unbindAll(ended func(*Entry) bool) (unbound []volume.Key) {
	var changed []volume.Key
	b.mu.Lock()
	for key, e := range b.entries {
		if !ended(e) || e.Live.Sandbox == "" {
			continue
		}
		if e.Live.shown() != "" {
			changed = append(changed, key)
		}
		e.Live = Binding{}
		unbound = append(unbound, key)
	}
	b.mu.Unlock()
	for _, key := range changed {
		b.changed(key)
	}
	return unbound
}

// Volumes lists the volumes for which want is true. Want must not call Bindings.
func (b *Bindings) Volumes(want func(Entry) bool) []*volume.Volume {
	return b.among(b.entries, want)
}

// Foreign lists those of others for which want is true.
func (b *Bindings) Foreign(want func(Entry) bool) []*volume.Volume {
	return b.among(b.foreign, want)
}

func (b *Bindings) among(entries map[volume.Key]*Entry, want func(Entry) bool) (out []*volume.Volume) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	for _, e := range entries {
		if want(*e) {
			out = append(out, e.Volume)
		}
	}
	return out
}

// changed reports a changed binding. The caller does not hold the lock.
func (b *Bindings) changed(key volume.Key) {
	if b.onChange != nil {
		b.onChange(key)
	}
}
