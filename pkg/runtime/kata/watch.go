package kata

import (
	"context"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
)

// Run watches Kata's tree and keeps connections until ctx ends.
func (h *Handler) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { h.pool.run(ctx); return nil })
	group.Go(func() error { return h.watch.Run(ctx) })
	return group.Wait()
}

// follower is the handler as the watch of its tree sees it.
type follower Handler

// Scan reads Kata's whole tree: our volumes' sandbox ids, and the volumes that
// other programs put there.
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

// Came takes notice of one directory of Kata's tree.
func (f *follower) Came(name string) {
	h := (*Handler)(f)
	target, ok := targetOf(name)
	if !ok {
		return // not a name that Kata would look for
	}
	key, dir := deferral.KeyOf(target), h.tree.Path(name)
	if h.isWatchedOwn(key) {
		return // our own Publish, as a rule: it shall cost no system call here
	}
	whose, marked, err := h.tree.OwnerOf(name)
	if err != nil || whose == tree.Nobody {
		return
	}
	if whose == tree.Us {
		key = marked // of the resolved target, which the name may not be
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

// Entered takes notice of a sandbox id, and of a foreign volume's file.
func (f *follower) Entered(key deferral.Key, name string) {
	if name == infoName {
		(*Handler)(f).rewritten(key)
		return
	}
	(*Handler)(f).sighted(key, name)
}

// Vanished forgets a directory that somebody removed. Should it have been one of
// ours, the reconciler puts it back.
func (f *follower) Vanished(key deferral.Key) {
	h := (*Handler)(f)
	h.mu.Lock()
	e, ok := h.entries[key]
	delete(h.entries, key)
	delete(h.adopted, key)
	h.mu.Unlock()
	if ok && (e.live.id != "" || e.foreign != "") {
		h.changed(key)
	}
}

func (h *Handler) isWatchedOwn(key deferral.Key) bool {
	h.mu.RLock()
	e, ok := h.entries[key]
	own := ok && e.foreign == ""
	h.mu.RUnlock()
	return own && h.watch.Has(key)
}

// watchFound sets the watch of a directory that others may be writing to
// already. It tells false for one that is gone again.
func (h *Handler) watchFound(key deferral.Key, target, dir string, whose tree.Owner) bool {
	h.mu.Lock()
	_, before := h.entries[key]
	e := h.trackLocked(key, podUIDOf(target))
	if whose == tree.Stranger {
		e.foreign = target
	}
	h.mu.Unlock()
	if tree.IsGone(h.watch.Add(key, dir, whose)) {
		if !before {
			h.untrack(key)
		}
		return false
	}
	return true
}
