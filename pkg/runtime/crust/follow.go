package crust

import (
	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
)

// follower is the handler as the watch of its tree sees it.
type follower Handler

// Scan reads the whole tree: our volumes' sandbox ids, and the volumes that other
// programs put there.
func (f *follower) Scan() {
	names, err := f.tree.Names()
	if err != nil {
		f.log.Warn("the tree of volumes cannot be read", zap.Error(err))
		return
	}
	for _, name := range names {
		f.Came(name)
	}
}

// Came takes notice of one directory of the tree.
func (f *follower) Came(name string) {
	h, key := (*Handler)(f), deferral.Key(name)
	if !abi.IsDirName(name) || h.isWatchedOwn(key) {
		return // our own Publish, as a rule: it shall cost no system call here
	}
	whose, _, err := h.tree.OwnerOf(name)
	if err != nil || whose == tree.Nobody {
		return
	}
	// Watched before it is read, so that nothing comes in between.
	h.trackFound(key, whose)
	if tree.IsGone(h.watch.Add(key, h.tree.Path(name), whose)) {
		h.untrack(key)
		return
	}
	if whose == tree.Stranger {
		h.adopt(key)
	}
	if ids := h.listIDs(key); len(ids) > 0 {
		h.sighted(key, ids[0])
	}
}

func (h *Handler) isWatchedOwn(key deferral.Key) bool {
	h.mu.RLock()
	e, ok := h.entries[key]
	own := ok && e.whose == tree.Us
	h.mu.RUnlock()
	return own && h.watch.Has(key)
}

// trackFound remembers a volume that is known by its directory only. Its record,
// where there is one, comes with the next Publish.
func (h *Handler) trackFound(key deferral.Key, whose tree.Owner) {
	h.mu.RLock()
	_, known := h.entries[key]
	h.mu.RUnlock()
	if !known {
		h.track(h.readVolume(string(key)), whose)
	}
}

// Entered takes notice of a sandbox id, and of a foreign volume's file.
func (f *follower) Entered(key deferral.Key, name string) {
	h := (*Handler)(f)
	switch {
	case name == abi.InfoName:
		if whose, _, err := h.tree.OwnerOf(string(key)); err == nil && whose == tree.Stranger {
			h.adopt(key)
		}
	case abi.IsSandboxID(name):
		h.sighted(key, name)
	}
}

// Vanished forgets a directory that somebody removed. Should it have been one of
// ours, the reconciler puts it back.
func (f *follower) Vanished(key deferral.Key) { (*Handler)(f).untrack(key) }

// TakeUp lists the volumes of other programs, for a start to call before anything
// is served: their devices have an owner, which a call of the first moment must
// not overlook. Run finds them again, with a watch on each.
func (h *Handler) TakeUp() {
	names, err := h.tree.Names()
	if err != nil {
		return // Run tells what is wrong with the tree
	}
	for _, name := range names {
		if !abi.IsDirName(name) {
			continue
		}
		if whose, _, err := h.tree.OwnerOf(name); err == nil && whose == tree.Stranger {
			h.adopt(deferral.Key(name))
		}
	}
}

// adopt lists a volume of another program, once its file can be read.
func (h *Handler) adopt(key deferral.Key) {
	v := h.readVolume(string(key))
	if v.Device.Path == "" {
		h.log.Debug("a foreign volume's mountInfo.json cannot be read (yet)", zap.String("volume", v.Target))
		return
	}
	v.Adopted = true
	h.track(v, tree.Stranger)
	h.log.Debug("a volume that another program published is served, and left as it is", zap.String("volume", v.Target))
	h.changed(key)
}

// Adopted lists the volumes that other programs published.
func (h *Handler) Adopted() []*deferral.Volume {
	h.mu.RLock()
	defer h.mu.RUnlock()
	var out []*deferral.Volume
	for _, e := range h.entries {
		if e.whose == tree.Stranger && e.volume.Adopted {
			out = append(out, e.volume)
		}
	}
	return out
}
