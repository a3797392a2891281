package kata

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
)

const (
	// The root: directories that other programs make, and its own end.
	rootEvents = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR
	// Our directories: sandbox ids only. Its end shows as IN_IGNORED.
	ownEvents = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_ONLYDIR | unix.IN_DONT_FOLLOW
	// Those of other programs, which write mountInfo.json in place.
	foreignEvents = ownEvents | unix.IN_CLOSE_WRITE | unix.IN_MOVE_SELF

	// rescanEvery is how often the tree is read where it cannot be watched, and
	// rescanRetry how soon after its root vanished.
	rescanEvery = 30 * time.Second
	rescanRetry = 200 * time.Millisecond
)

// watch is the inotify instance of one Run. Its maps are guarded by Handler.mu.
type watch struct {
	*tree.Inotify
	root   int32
	byWD   map[int32]deferral.Key
	rescan chan struct{}
}

func newWatch() (*watch, error) {
	inotify, err := tree.NewInotify()
	if err != nil {
		return nil, err
	}
	return &watch{Inotify: inotify, byWD: make(map[int32]deferral.Key), rescan: make(chan struct{}, 1)}, nil
}

// forget ends a watch. The kernel's last event for it finds nobody.
func (w *watch) forget(wd int32) {
	if w == nil || wd == 0 {
		return
	}
	delete(w.byWD, wd)
	// The directory is about to go, and the watch with it: no call is needed.
}

// askRescan has the tree read once more.
func (w *watch) askRescan() {
	select {
	case w.rescan <- struct{}{}:
	default:
	}
}

// Run watches Kata's tree and keeps connections until ctx ends.
func (h *Handler) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { h.pool.run(ctx); return nil })
	w, err := newWatch()
	if err != nil {
		h.setUnwatched(err)
		group.Go(func() error { return h.rescanLoop(ctx, nil) })
		return group.Wait()
	}
	h.setWatch(w)
	group.Go(func() error { return h.rescanLoop(ctx, w) })
	group.Go(func() error { return h.readEvents(ctx, w) })
	err = group.Wait()
	h.setWatch(nil)
	return errors.Join(err, w.Close())
}

func (h *Handler) setWatch(w *watch) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watch = w
	for _, e := range h.entries {
		e.wd = 0
	}
}

func (h *Handler) setUnwatched(err error) {
	h.mu.Lock()
	first := h.unwatch == nil
	h.unwatch = err
	h.mu.Unlock()
	if first && err != nil {
		h.log.Warn("Kata's tree of volumes cannot be watched: bindings show late", zap.Error(err))
	}
}

// rescanLoop reads the whole tree at start, when events were lost, when the
// root was replaced, and now and then where there is no watch.
func (h *Handler) rescanLoop(ctx context.Context, w *watch) error {
	tick := time.NewTicker(rescanEvery)
	defer tick.Stop()
	var asked chan struct{}
	if w != nil {
		asked = w.rescan
		w.askRescan()
	} else {
		h.scan(nil)
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-asked:
			h.scan(w)
		case <-tick.C:
			if w == nil || h.isUnwatched() {
				h.scan(w)
			}
		}
	}
}

func (h *Handler) isUnwatched() bool {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.unwatch != nil
}

// watchRoot must come before the tree is listed.
func (h *Handler) watchRoot(w *watch) {
	if w == nil {
		return
	}
	if err := os.MkdirAll(h.cfg.DirectVolumes, 0o700); err != nil {
		h.setUnwatched(err)
		return
	}
	wd, err := w.Add(h.cfg.DirectVolumes, rootEvents)
	if err != nil {
		h.setUnwatched(err)
		return
	}
	h.mu.Lock()
	w.root = wd
	h.mu.Unlock()
	h.setUnwatched(nil)
}

// watchNew watches a directory of ours that nobody else can reach yet.
func (h *Handler) watchNew(e *entry, dir string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watch == nil {
		return
	}
	if err := h.addWatch(e, dir, ownEvents); err != nil {
		h.unwatch = err
	}
}

// addWatch is called with Handler.mu held, so that the first event of a watch
// finds it in the map.
func (h *Handler) addWatch(e *entry, dir string, events uint32) error {
	if h.watch == nil {
		return nil
	}
	wd, err := h.watch.Add(dir, events)
	if err != nil {
		return err
	}
	e.wd = wd
	h.watch.byWD[e.wd] = e.key
	return nil
}

func (h *Handler) readEvents(ctx context.Context, w *watch) error {
	err := w.Read(ctx, func(wd int32, mask uint32, name string) { h.event(w, wd, mask, name) })
	if err != nil {
		return deferral.Errorf(deferral.Internal, "kata: the events of the tree of volumes cannot be read: %w", err)
	}
	return nil
}

func (h *Handler) event(w *watch, wd int32, mask uint32, name string) {
	h.mu.RLock()
	key, known := w.byWD[wd]
	root := w.root
	h.mu.RUnlock()
	switch {
	case mask&unix.IN_Q_OVERFLOW != 0:
		w.askRescan()
	case wd == root:
		h.rootEvent(w, mask, name)
	case !known:
	case mask&(unix.IN_IGNORED|unix.IN_MOVE_SELF|unix.IN_UNMOUNT) != 0:
		h.vanished(key, wd)
	case mask&unix.IN_ISDIR != 0:
	case name == infoName:
		h.rewritten(key)
	case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		h.sighted(key, name)
	}
}

func (h *Handler) rootEvent(w *watch, mask uint32, name string) {
	if mask&(unix.IN_IGNORED|unix.IN_DELETE_SELF|unix.IN_MOVE_SELF|unix.IN_UNMOUNT) != 0 {
		if mask&unix.IN_IGNORED == 0 {
			time.AfterFunc(rescanRetry, w.askRescan)
		}
		return
	}
	if mask&unix.IN_ISDIR != 0 {
		h.look(filepath.Join(h.cfg.DirectVolumes, name), name)
	}
}

// vanished forgets a directory that somebody removed. Should it have been one
// of ours, the reconciler puts it back.
func (h *Handler) vanished(key deferral.Key, wd int32) {
	h.mu.Lock()
	delete(h.watch.byWDOrNil(), wd)
	e, ok := h.entries[key]
	if !ok || e.wd != wd {
		h.mu.Unlock()
		return
	}
	delete(h.entries, key)
	delete(h.adopted, key)
	h.mu.Unlock()
	if e.live.id != "" || e.foreign != "" {
		h.changed(key)
	}
}

func (w *watch) byWDOrNil() map[int32]deferral.Key {
	if w == nil {
		return nil
	}
	return w.byWD
}
