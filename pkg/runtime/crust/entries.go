package crust

import (
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
)

// entry is what is remembered of one volume: for lists, and to tell of changes.
// What a call needs is read from the volume's directory each time.
type entry struct {
	volume *deferral.Volume
	whose  tree.Owner
	// live is the binding that is taken for the present one.
	live  string
	since time.Time
}

// track remembers a volume.
func (h *Handler) track(v *deferral.Volume, whose tree.Owner) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e, ok := h.entries[v.Key]
	if !ok {
		e = &entry{}
		h.entries[v.Key] = e
	}
	e.volume, e.whose = v, whose
}

func (h *Handler) untrack(key deferral.Key) {
	h.mu.Lock()
	e, ok := h.entries[key]
	delete(h.entries, key)
	h.mu.Unlock()
	h.watch.Forget(key)
	if ok && (e.live != "" || e.whose == tree.Stranger) {
		h.changed(key)
	}
}

// Binding is the last known binding, from memory.
func (h *Handler) Binding(v *deferral.Volume) (runtime.Binding, bool) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	e, ok := h.entries[v.Key]
	if !ok || e.live == "" {
		return runtime.Binding{}, false
	}
	return runtime.Binding{Sandbox: e.live, Runtime: Name, Since: e.since}, true
}

// bind notes which sandbox has the volume now; an empty id says that none has.
func (h *Handler) bind(key deferral.Key, id string) {
	h.mu.Lock()
	e, ok := h.entries[key]
	changed := ok && e.live != id
	if changed {
		e.live, e.since = id, time.Now()
	}
	h.mu.Unlock()
	if changed {
		h.changed(key)
	}
}

// sighted notes that a sandbox-id file appeared: the newest one is the live one
// until shown otherwise.
func (h *Handler) sighted(key deferral.Key, id string) {
	h.mu.RLock()
	e, ok := h.entries[key]
	pod := ""
	if ok {
		pod = e.volume.PodUID
	}
	h.mu.RUnlock()
	if ok && !h.ofOtherPod(id, pod) {
		h.bind(key, id)
	}
}

// ofOtherPod tells whether an id file must lie: a volume belongs to one pod.
func (h *Handler) ofOtherPod(id, podUID string) bool {
	if h.sandboxes == nil || podUID == "" {
		return false
	}
	pod, known := h.sandboxes.PodOf(id)
	return known && pod != podUID
}

// isGone tells whether the container runtime has no such sandbox. It may not have
// told yet of one that is new.
func (h *Handler) isGone(id string) bool {
	if h.sandboxes == nil || !h.sandboxes.Ready() {
		return false
	}
	_, known := h.sandboxes.PodOf(id)
	return !known
}

// SandboxAdded tells the handler that a pod has a new sandbox. Which volumes that
// mounts, its own files say.
func (h *Handler) SandboxAdded(string, string) {}

// SandboxGone tells the handler that a sandbox has ended.
func (h *Handler) SandboxGone(id string) {
	if !abi.IsSandboxID(id) {
		return
	}
	var keys []deferral.Key
	h.mu.Lock()
	for key, e := range h.entries {
		if e.live == id {
			e.live = ""
			keys = append(keys, key)
		}
	}
	h.mu.Unlock()
	for _, key := range keys {
		h.changed(key)
		h.enqueue(job{key: key, gone: id})
	}
}
