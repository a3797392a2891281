package crust

import (
	"context"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
)

const (
	// maxJobs bounds what waits to be cleared away; what finds no room is found
	// again by the reconciler.
	maxJobs = 4096
	// lockTime bounds the wait for a handler that changes the directory.
	lockTime = 2 * time.Second
	// verifyTime bounds the question whether a sandbox lives.
	verifyTime = 3 * time.Second
)

// job is work for Run: to clear away a sandbox that is gone or, without one, to
// ask whether a volume's sandbox still lives.
type job struct {
	key  deferral.Key
	gone string
}

func (h *Handler) enqueue(j job) {
	select {
	case h.jobs <- j:
	default:
	}
}

// work does the jobs, one at a time.
func (h *Handler) work(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case j := <-h.jobs:
			h.do(ctx, j)
		}
	}
}

func (h *Handler) do(ctx context.Context, j job) {
	h.mu.RLock()
	e, ok := h.entries[j.key]
	h.mu.RUnlock()
	if !ok {
		return
	}
	if j.gone != "" {
		h.clearThose(e.volume, func(id string) bool { return id == j.gone })
		return
	}
	// Where no sandbox lives, the question alone clears the files of the dead away.
	live, err := h.InUse(ctx, e.volume)
	if err != nil {
		h.log.Debug("a volume's sandbox cannot be asked", zap.String("volume", e.volume.Target), zap.Error(err))
	}
	if live != "" {
		// The others were there before it, and would be known if they lived.
		h.clearThose(e.volume, func(id string) bool { return id != live && h.isGone(id) })
	}
}

// clearThose clears the sandboxes away that are told to be dead.
func (h *Handler) clearThose(v *deferral.Volume, dead func(id string) bool) {
	seen, err := h.look(v)
	if err != nil {
		h.log.Warn("dead sandboxes cannot be cleared away", zap.String("volume", v.Target), zap.Error(err))
		return
	}
	seen.ids = slices.DeleteFunc(seen.ids, func(id string) bool { return !dead(id) })
	if len(seen.ids) > 0 {
		h.clear(v, seen)
	}
}

// suspect has Run ask about a volume whose sandbox the container runtime does not
// know, or where none is followed.
func (h *Handler) suspect(v *deferral.Volume) {
	for _, id := range h.listIDs(v.Key) {
		if h.isGone(id) || h.sandboxes == nil {
			h.enqueue(job{key: v.Key})
			return
		}
	}
}

// clear drops the files of dead sandboxes, as they were seen, and with the last of
// them what says how to ask. It tells whether there is another sandbox. What
// another broker published is that one's to clear.
func (h *Handler) clear(v *deferral.Volume, seen *sight) (another bool) {
	if whose, _, err := h.tree.OwnerOf(string(v.Key)); err != nil || whose != tree.Us {
		h.bind(v.Key, "")
		return false
	}
	dir, err := abi.Open(h.cfg.Root, string(v.Key))
	if err != nil {
		return false
	}
	defer func() { _ = dir.Close() }()
	if err := dir.Lock(lockTime); err != nil {
		h.log.Warn("dead sandboxes cannot be cleared away", zap.String("volume", v.Target), zap.Error(err))
		return false
	}
	left, err := h.clearLocked(v, dir, seen)
	if err != nil {
		h.log.Warn("dead sandboxes cannot be cleared away", zap.String("volume", v.Target), zap.Error(err))
	}
	if len(left) == 0 {
		h.bind(v.Key, "")
		return false
	}
	h.sighted(v.Key, left[0])
	return true
}

// clearLocked leaves alone what came since: a new sandbox has the volume, and has
// said anew how to ask.
func (h *Handler) clearLocked(v *deferral.Volume, dir *abi.Dir, seen *sight) (left []string, err error) {
	for _, id := range seen.ids {
		if now, there := h.identify(v.Key, id); there && now == seen.files[id] {
			if err := dir.Remove(id); err != nil {
				return nil, err
			}
		}
	}
	left, err = dir.Sandboxes()
	if err != nil || len(left) > 0 {
		return left, err
	}
	for _, name := range []string{abi.CLIName, abi.SocketName} {
		if err := dir.Remove(name); err != nil {
			return nil, err
		}
	}
	return nil, nil
}
