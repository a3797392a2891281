package admin

import (
	"maps"
	"slices"
	"sync"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Hub notifies watchers of changed volumes. A slow watcher gets each volume once, in its
// latest state, and nothing waits for it. One that is not read while too many change ends.
type Hub struct {
	mu       sync.Mutex
	watchers map[*watcher]struct{}
}

type watcher struct {
	wake    chan struct{}           // has a token while pending is not empty
	pending map[volume.Key]struct{} // guarded by the hub's lock
}

// NewHub returns a hub without watchers.
func NewHub() *Hub { return &Hub{watchers: make(map[*watcher]struct{})} }

// Changed notifies all watchers of a volume. It never blocks.
func (h *Hub) Changed(key volume.Key) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watchers {
		if len(w.pending) <= maxPending {
			w.pending[key] = struct{}{}
		}
		sys.Wake(w.wake)
	}
}

// maxWatchers bounds the watchers. Each costs memory for every volume, some megabytes with 10,000 of them.
const maxWatchers = 128
const maxPending = 1 << 15 // changed volumes of a watcher that is not read; with one more, some may be missing

func (h *Hub) subscribe() (w *watcher, unsubscribe func(), err error) {
	w = &watcher{wake: make(chan struct{}, 1), pending: make(map[volume.Key]struct{})}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.watchers) >= maxWatchers {
		return nil, nil, volume.Errorf(volume.Exhausted, "volumes are watched by %d others already: end one of them", maxWatchers)
	}
	h.watchers[w] = struct{}{}
	return w, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.watchers, w)
	}, nil
}

// take returns what changed since the last call, and fails if that is not known any more.
func (h *Hub) take(w *watcher) ([]volume.Key, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(w.pending) > maxPending {
		return nil, volume.Errorf(volume.Exhausted, "more than %d volumes have changed, and nobody has read that: watch again", maxPending)
	}
	keys := slices.Collect(maps.Keys(w.pending))
	clear(w.pending)
	return keys, nil
}
