package sandbox

import (
	"context"
	"sync/atomic"

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

// cri follows any container runtime by the API that kubelet uses.
//
// A sandbox is live while the runtime says that it is ready. What exactly makes
// it so is the runtime's affair, and includes sandboxes without a container.
type cri struct {
	t    *Tracker
	cfg  CRIConfig
	pace pace
	// asks is set while the runtime reports no changes.
	asks atomic.Bool
	conn atomic.Pointer[criClient] // nil while not connected
}

// NewCRI makes a tracker by the CRI that knows nothing until Run runs.
func NewCRI(cfg CRIConfig, log *zap.Logger) *Tracker {
	t := newTracker("the container runtime at "+cfg.Socket, cfg.OnAdded, cfg.OnGone, log)
	t.source = &cri{t: t, cfg: cfg, pace: usualPace()}
	return t
}

func (s *cri) polled() bool { return s.asks.Load() }

func (s *cri) current() asker {
	if c := s.conn.Load(); c != nil {
		return c
	}
	return nil
}

func (s *cri) follow(ctx context.Context) error {
	c, err := dialCRI(s.t, s.cfg.Socket)
	if err != nil {
		return err
	}
	f := &criFollower{s: s, t: s.t, c: c, hints: make(chan struct{}, 1), ended: make(chan error, 1)}
	ctx, cancel := context.WithCancel(ctx)
	defer s.conn.Store(nil)
	defer f.beside.Wait()
	defer func() { _ = c.conn.Close() }()
	defer cancel()
	if err := f.subscribe(ctx); err != nil {
		return err
	}
	return f.loop(ctx)
}

func (s *cri) busy() bool { return s.cfg.Busy == nil || s.cfg.Busy() }
