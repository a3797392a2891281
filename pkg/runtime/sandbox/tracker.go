// Package sandbox follows containerd: which sandboxes a pod has, and when one
// comes or goes.
//
// It speaks containerd's gRPC API through the generated module, not through the
// client library: listing containers and reading events needs a tenth of that
// code, and the wire is the same for containerd 1.6, 1.7 and 2.x.
//
// A sandbox is what CRI labels as one and whose task runs. A runtime for which
// containerd is set to `sandboxer = "shim"` has sandboxes without a container,
// which are not seen here; Kata's default is containerd's "podsandbox", whose
// are.
package sandbox

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// Config says where containerd is and who wants to know.
type Config struct {
	Socket    string
	Namespace string
	// OnAdded and OnGone are told of sandboxes that came and went. They are
	// called one at a time and must not block; they may be nil.
	OnAdded func(podUID, id string)
	OnGone  func(id string)
}

// Tracker knows the live sandboxes. Its look-ups are from memory.
type Tracker struct {
	cfg Config
	log *zap.Logger

	mu    sync.RWMutex
	known map[string]sandbox
	pods  map[string][]sandbox // by pod UID, the newest first
	ready bool
	last  error

	client struct {
		sync.Mutex
		*client
	}
}

// New makes a tracker that knows nothing until Run runs.
func New(cfg Config, log *zap.Logger) *Tracker {
	return &Tracker{
		cfg: cfg, log: log, known: make(map[string]sandbox), pods: make(map[string][]sandbox),
		last: deferral.Errorf(deferral.NoSandbox, "containerd at %s has not answered yet", cfg.Socket),
	}
}

const (
	firstPause = 100 * time.Millisecond
	lastPause  = 15 * time.Second
)

// Run follows containerd until ctx ends, over its restarts and absences.
func (t *Tracker) Run(ctx context.Context) error {
	pause := firstPause
	for ctx.Err() == nil {
		start := time.Now()
		err := t.follow(ctx)
		isNew := t.lost(err)
		t.setCurrent(nil)
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(start) > lastPause {
			pause = firstPause
		}
		if isNew {
			t.log.Warn("containerd cannot be followed; trying again", zap.Error(err))
		}
		// Jitter, so that many daemons do not come back to one node at once.
		wait := pause/2 + rand.N(pause/2) //nolint:gosec // no secret hangs on it
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
		pause = min(2*pause, lastPause)
	}
	return nil
}

// lost notes that nothing new is learned for now, and tells whether that is new.
// What is known stays: a sandbox does not end because containerd restarts.
func (t *Tracker) lost(err error) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	err = deferral.Errorf(deferral.NoSandbox, "containerd at %s cannot be followed; is it running? %w", t.cfg.Socket, err)
	isNew := t.ready || t.last == nil || t.last.Error() != err.Error()
	t.ready, t.last = false, err
	return isNew
}

// found notes that what is known is what there is.
func (t *Tracker) found() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ready, t.last = true, nil
}

// Ready tells whether containerd is being followed.
func (t *Tracker) Ready() bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.ready
}

// LastError tells why not.
func (t *Tracker) LastError() error {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.last
}

// current gives the connection that Run has made, or nil.
func (t *Tracker) current() *client {
	t.client.Lock()
	defer t.client.Unlock()
	return t.client.client
}

func (t *Tracker) setCurrent(c *client) {
	t.client.Lock()
	defer t.client.Unlock()
	t.client.client = c
}
