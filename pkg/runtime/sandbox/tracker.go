// Package sandbox follows the container runtime: which sandboxes a pod has, with
// which runtime handler, and when one comes or goes. Tracker asks containerd's
// own API, CRI the one that kubelet uses, which CRI-O has as well.
package sandbox

import (
	"context"
	"sync"

	"go.uber.org/zap"
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

// Tracker knows the live sandboxes of containerd.
//
// It speaks containerd's gRPC API through the generated module, not through the
// client library: listing containers and reading events needs a tenth of that
// code, and the wire is the same for containerd 1.6, 1.7 and 2.x.
//
// A sandbox is what CRI labels as one and whose task runs. A runtime for which
// containerd is set to `sandboxer = "shim"` has sandboxes without a container,
// which are not seen here, but through the CRI; Kata's default is containerd's
// "podsandbox", whose are.
type Tracker struct {
	*Live
	cfg Config

	client struct {
		sync.Mutex
		*client
	}
}

// New makes a tracker that knows nothing until Run runs.
func New(cfg Config, log *zap.Logger) *Tracker {
	return &Tracker{Live: newLive("containerd at "+cfg.Socket, cfg.OnAdded, cfg.OnGone, log), cfg: cfg}
}

// Run follows containerd until ctx ends, over its restarts and absences.
func (t *Tracker) Run(ctx context.Context) error {
	return t.run(ctx, func(ctx context.Context) error {
		defer t.setCurrent(nil)
		return t.follow(ctx)
	})
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
