package sandbox

import (
	"context"
	"sync"

	"go.uber.org/zap"
)

// CRIConfig says where the container runtime is and who wants to know.
type CRIConfig struct {
	Socket string
	// OnAdded and OnGone are told of sandboxes that came and went. They are
	// called one at a time and must not block; they may be nil.
	OnAdded func(podUID, id string)
	OnGone  func(id string)
	// Busy tells whether there are volumes, so that sandboxes matter. A runtime
	// that tells of no changes is asked rarely while there are none; nil is always.
	// It must not block.
	Busy func() bool
}

// CRI knows the live sandboxes of any container runtime, by the API that kubelet
// uses.
//
// A sandbox is live while the runtime says that it is ready. What exactly makes
// it so is the runtime's affair, and includes sandboxes without a container.
type CRI struct {
	*Live
	cfg  CRIConfig
	pace pace

	client struct {
		sync.Mutex
		*criClient
	}
}

// NewCRI makes a tracker that knows nothing until Run runs.
func NewCRI(cfg CRIConfig, log *zap.Logger) *CRI {
	live := newLive("the container runtime at "+cfg.Socket, cfg.OnAdded, cfg.OnGone, log)
	return &CRI{Live: live, cfg: cfg, pace: usualPace()}
}

// Run follows the runtime until ctx ends, over its restarts and absences.
func (t *CRI) Run(ctx context.Context) error {
	return t.run(ctx, func(ctx context.Context) error {
		defer t.setCurrent(nil)
		return t.follow(ctx)
	})
}

// current gives the connection that Run has made, or nil.
func (t *CRI) current() *criClient {
	t.client.Lock()
	defer t.client.Unlock()
	return t.client.criClient
}

func (t *CRI) setCurrent(c *criClient) {
	t.client.Lock()
	defer t.client.Unlock()
	t.client.criClient = c
}

func (t *CRI) busy() bool { return t.cfg.Busy == nil || t.cfg.Busy() }
