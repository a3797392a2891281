package kata

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"go.uber.org/zap"

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
