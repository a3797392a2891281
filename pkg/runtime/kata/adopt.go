package kata

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
)

// podOfTarget finds the pod in kubelet's layout.
var podOfTarget = regexp.MustCompile(`/pods/([A-Za-z0-9][A-Za-z0-9-]{0,63})/volumes/`)

func podUIDOf(target string) string {
	if parts := podOfTarget.FindStringSubmatch(target); parts != nil {
		return parts[1]
	}
	return ""
}

// scan reads Kata's whole tree: our volumes' sandbox ids, and the volumes that
// other programs put there.
func (h *Handler) scan(w *watch) {
	h.watchRoot(w)
	names, err := h.tree.Names()
	if err != nil {
		h.setUnwatched(err)
		return
	}
	for _, name := range names {
		h.look(h.tree.Path(name), name)
	}
}

// TakeUp lists the volumes of other programs, for a start to call before anything
// is served: their devices have an owner, which a call of the first moment must
// not overlook. Run finds them again, with a watch on each.
func (h *Handler) TakeUp() {
	names, err := h.tree.Names()
	if err != nil {
		return // Run tells what is wrong with the tree
	}
	for _, name := range names {
		target, ok := targetOf(name)
		if !ok {
			continue
		}
		dir := h.tree.Path(name)
		if whose, _, err := h.tree.OwnerOf(name); err == nil && whose == tree.Stranger {
			h.adopt(deferral.KeyOf(target), dir, target)
		}
	}
}

// look takes notice of one directory of Kata's tree.
func (h *Handler) look(dir, name string) {
	target, ok := targetOf(name)
	if !ok {
		return // not a name that Kata would look for
	}
	key := deferral.KeyOf(target)
	if h.isWatchedOwn(key) {
		return // our own Publish, as a rule: it shall cost no system call here
	}
	whose, _, err := h.tree.OwnerOf(name)
	if err != nil || whose == tree.Nobody {
		return
	}
	if !h.watchFound(key, target, dir, whose) {
		return
	}
	if whose == tree.Stranger {
		h.adopt(key, dir, target)
	}
	if ids := listIDs(dir); len(ids) > 0 {
		h.sighted(key, ids[0])
	}
}

func (h *Handler) isWatchedOwn(key deferral.Key) bool {
	h.mu.RLock()
	defer h.mu.RUnlock()
	e, ok := h.entries[key]
	return ok && e.wd != 0 && e.foreign == ""
}

// watchFound sets the watch of a directory that others may be writing to
// already. It tells false for one that is watched, or that is gone again.
func (h *Handler) watchFound(key deferral.Key, target, dir string, whose tree.Owner) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	e, before := h.entries[key]
	if before && e.wd != 0 && whose == tree.Us {
		return false
	}
	e = h.trackLocked(key, podUIDOf(target))
	events := uint32(ownEvents)
	if whose == tree.Stranger {
		e.foreign, events = target, foreignEvents
	}
	err := h.addWatch(e, dir, events)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		if !before {
			delete(h.entries, key)
		}
		return false
	}
	if err != nil {
		h.unwatch = err
	}
	return true
}

// adopt lists a volume of another program, once its file can be read.
func (h *Handler) adopt(key deferral.Key, dir, target string) {
	v := readVolume(dir, target)
	if v.Device.Path == "" {
		h.log.Debug("a foreign volume's mountInfo.json cannot be read (yet)", zap.String("volume", target))
		return
	}
	v.Adopted = true
	h.mu.Lock()
	_, before := h.adopted[key]
	h.adopted[key] = v
	h.mu.Unlock()
	if !before {
		h.log.Info("a volume that another program published to Kata is served, and left as it is", zap.String("volume", target))
	}
	h.changed(key)
}

// rewritten reads a foreign volume's file once more. A file of ours is known.
func (h *Handler) rewritten(key deferral.Key) {
	h.mu.RLock()
	target := ""
	if e, ok := h.entries[key]; ok {
		target = e.foreign
	}
	h.mu.RUnlock()
	if target != "" {
		h.adopt(key, h.cfg.DirectVolumes+"/"+dirName(target), target)
	}
}

// readVolume reads a volume back from its directory. Only the paths are there
// where the file cannot be read.
func readVolume(dir, target string) *deferral.Volume {
	v := &deferral.Volume{
		Key: deferral.KeyOf(target), Target: target, ResolvedTarget: target,
		Handler: Name, PodUID: podUIDOf(target),
	}
	raw, err := tree.ReadSmall(filepath.Join(dir, infoName), maxInfo)
	if err != nil {
		return v
	}
	info, err := parseInfo(raw)
	if err != nil {
		return v
	}
	v.Device = tree.Identify(info.Device)
	v.FSType = info.FSType
	v.MountFlags = info.Options
	v.ReadOnly = slices.Contains(info.Options, "ro")
	v.Group = info.Metadata["fsGroup"]
	v.GroupPolicy = deferral.GroupPolicy(info.Metadata["fsGroupChangePolicy"])
	if st, err := os.Lstat(filepath.Join(dir, infoName)); err == nil {
		v.Created = st.ModTime().Round(time.Microsecond)
	}
	return v
}

// Adopted lists the volumes that other programs published to Kata.
func (h *Handler) Adopted() []*deferral.Volume {
	h.mu.RLock()
	defer h.mu.RUnlock()
	out := make([]*deferral.Volume, 0, len(h.adopted))
	for _, v := range h.adopted {
		out = append(out, v)
	}
	return out
}
