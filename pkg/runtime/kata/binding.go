package kata

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
)

// idForm is what a sandbox id may look like. It becomes part of a path.
var idForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)

// maxIDs bounds the sandbox ids taken from one volume's directory.
const maxIDs = 64

// entry is what is remembered of one volume. It is guarded by Handler.mu.
type entry struct {
	podUID string
	// foreign is the target of another program's volume, "" for one of ours.
	foreign string
	// bound is set once any sandbox was seen to have the volume.
	bound bool
	// live is the binding that is taken for the present one.
	live binding
	// guest is the volume's path in the guest of a runtime-rs sandbox.
	guest string
}

type binding struct {
	id     string
	flavor flavor
	since  time.Time
}

// flavor tells Kata's two runtimes apart.
type flavor uint8

const (
	goShim flavor = iota
	rustShim
)

func (f flavor) String() string {
	if f == rustShim {
		return "kata-rs"
	}
	return "kata-go"
}

// track remembers a volume of ours.
func (h *Handler) track(v *deferral.Volume) *entry {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.trackLocked(v.Key, v.PodUID)
}

func (h *Handler) trackLocked(key deferral.Key, podUID string) *entry {
	e, ok := h.entries[key]
	if !ok {
		e = &entry{}
		h.entries[key] = e
	}
	if podUID != "" {
		e.podUID = podUID
	}
	return e
}

func (h *Handler) untrack(key deferral.Key) {
	h.mu.Lock()
	e, ok := h.entries[key]
	delete(h.entries, key)
	h.mu.Unlock()
	h.watch.Forget(key)
	if ok && e.live.id != "" {
		h.changed(key)
	}
}

func (h *Handler) changed(keys ...deferral.Key) {
	if h.cfg.OnChange == nil {
		return
	}
	for _, key := range keys {
		h.cfg.OnChange(key)
	}
}

// Binding is the last known binding, from memory.
func (h *Handler) Binding(v *deferral.Volume) (runtime.Binding, bool) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	e, ok := h.entries[v.Key]
	if !ok || e.live.id == "" {
		return runtime.Binding{}, false
	}
	return runtime.Binding{Sandbox: e.live.id, Runtime: e.live.flavor.String(), Since: e.live.since}, true
}

// current is the binding and the ids to try after it, without any system call.
func (h *Handler) current(v *deferral.Volume) (live binding, guest string, known bool) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	e, ok := h.entries[v.Key]
	if !ok {
		return binding{}, "", false
	}
	return e.live, e.guest, true
}

// bind notes which sandbox has the volume now; an empty id says that none has.
func (h *Handler) bind(v *deferral.Volume, id string, f flavor) binding {
	h.mu.Lock()
	e := h.trackLocked(v.Key, v.PodUID)
	before := e.live
	if id != before.id || f != before.flavor {
		e.live = binding{id: id, flavor: f, since: time.Now()}
		e.guest = ""
	}
	e.bound = e.bound || id != ""
	if id == "" {
		e.live = binding{}
	}
	now := e.live
	h.mu.Unlock()
	if now.id != before.id {
		h.changed(v.Key)
	}
	return now
}

func (h *Handler) setGuest(v *deferral.Volume, id, guest string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if e, ok := h.entries[v.Key]; ok && e.live.id == id {
		e.guest = guest
	}
}

// candidates lists the sandboxes that may have the volume, the likeliest first:
// those that left their id in its directory, then those of its pod.
func (h *Handler) candidates(v *deferral.Volume) []string {
	ids := h.idsOnDisk(v)
	if h.sandboxes == nil {
		return ids
	}
	ids = slices.DeleteFunc(ids, func(id string) bool { return h.ofOtherPod(id, v.PodUID) })
	if v.PodUID == "" {
		return ids
	}
	for _, id := range h.sandboxes.OfPod(v.PodUID) {
		if idForm.MatchString(id) && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// ofOtherPod tells whether an id file must lie: a volume belongs to one pod.
func (h *Handler) ofOtherPod(id, podUID string) bool {
	if h.sandboxes == nil || podUID == "" {
		return false
	}
	pod, known := h.sandboxes.PodOf(id)
	return known && pod != podUID
}

// idsOnDisk lists the sandbox-id files of a volume, the newest first. The Go
// runtime writes one when it creates a container; nobody removes it.
func (h *Handler) idsOnDisk(v *deferral.Volume) []string {
	if !hasName(v) {
		return nil
	}
	return listIDs(h.volumeDir(v))
}

func listIDs(dir string) []string {
	names, err := tree.ReadNames(dir, maxIDs+1)
	if err != nil {
		return nil
	}
	type sighting struct {
		id string
		at int64
	}
	var found []sighting
	for _, name := range names {
		if name == infoName || !idForm.MatchString(name) {
			continue
		}
		var st unix.Stat_t
		if unix.Lstat(filepath.Join(dir, name), &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG {
			found = append(found, sighting{name, st.Mtim.Nano()})
		}
	}
	slices.SortFunc(found, func(a, b sighting) int {
		if a.at != b.at {
			return int(min(max(b.at-a.at, -1), 1))
		}
		return strings.Compare(a.id, b.id)
	})
	ids := make([]string, len(found))
	for i, f := range found {
		ids[i] = f.id
	}
	return ids
}

// socketOf is where the sandbox's shim listens.
func (h *Handler) socketOf(id string, f flavor) string {
	root := h.cfg.GoSandboxes
	if f == rustShim {
		root = h.cfg.RustSandboxes
	}
	return root + "/" + id + "/shim-monitor.sock"
}

// guessFlavor tells the runtime of a sandbox that was not spoken to yet.
func (h *Handler) guessFlavor(id string) flavor {
	var st unix.Stat_t
	if unix.Lstat(h.socketOf(id, goShim), &st) != nil && unix.Lstat(h.socketOf(id, rustShim), &st) == nil {
		return rustShim
	}
	return goShim
}

// sighted notes that a sandbox-id file appeared: the newest one is the live one
// until shown otherwise.
func (h *Handler) sighted(key deferral.Key, id string) {
	if !idForm.MatchString(id) {
		return
	}
	f := h.guessFlavor(id)
	h.mu.Lock()
	e, ok := h.entries[key]
	if !ok || h.ofOtherPod(id, e.podUID) {
		h.mu.Unlock()
		return
	}
	changed := e.live.id != id
	if changed {
		e.live, e.guest = binding{id: id, flavor: f, since: time.Now()}, ""
	}
	e.bound = true
	h.mu.Unlock()
	if changed {
		h.changed(key)
	}
}

// SandboxAdded tells the handler that a pod has a new sandbox. An old one is no
// longer taken for granted: the next call looks which of them is alive.
func (h *Handler) SandboxAdded(podUID, id string) {
	if podUID == "" || !idForm.MatchString(id) {
		return
	}
	rust := h.guessFlavor(id) == rustShim
	var keys []deferral.Key
	h.mu.Lock()
	for key, e := range h.entries {
		if e.podUID != podUID || e.live.id == id {
			continue
		}
		if e.bound = true; !rust && e.live.id == "" {
			continue
		}
		// Only runtime-rs leaves no id file, by which a binding would show.
		e.live, e.guest = binding{}, ""
		if rust {
			e.live = binding{id: id, flavor: rustShim, since: time.Now()}
		}
		keys = append(keys, key)
	}
	h.mu.Unlock()
	h.changed(keys...)
}

// SandboxGone tells the handler that a sandbox has ended.
func (h *Handler) SandboxGone(id string) {
	var keys []deferral.Key
	h.mu.Lock()
	for key, e := range h.entries {
		if e.live.id == id {
			e.live, e.guest = binding{}, ""
			keys = append(keys, key)
		}
	}
	h.mu.Unlock()
	h.pool.drop(h.socketOf(id, goShim))
	h.pool.drop(h.socketOf(id, rustShim))
	h.changed(keys...)
}
