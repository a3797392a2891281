package sandbox

import (
	"context"
	"sync/atomic"

	"github.com/containerd/containerd/api/types"
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

// containerd follows containerd by its own API.
//
// It speaks containerd's gRPC API through the generated module, not through the
// client library: listing containers and reading events needs a tenth of that
// code, and the wire is the same for containerd 1.6, 1.7 and 2.x.
//
// A sandbox is what CRI labels as one and whose task runs. A runtime for which
// containerd is set to `sandboxer = "shim"` has sandboxes without a container,
// which are not seen here, but through the CRI; Kata's default is containerd's
// "podsandbox", whose are.
type containerd struct {
	t    *Tracker
	cfg  Config
	conn atomic.Pointer[client] // nil while not connected
}

// New makes a tracker of containerd that knows nothing until Run runs.
func New(cfg Config, log *zap.Logger) *Tracker {
	t := newTracker("containerd at "+cfg.Socket, cfg.OnAdded, cfg.OnGone, log)
	t.source = &containerd{t: t, cfg: cfg}
	return t
}

func (s *containerd) polled() bool { return false }

func (s *containerd) current() asker {
	if c := s.conn.Load(); c != nil {
		return c
	}
	return nil
}

// follow lists the sandboxes and then goes by events, until something breaks.
func (s *containerd) follow(ctx context.Context) error {
	c, err := dial(s.t, s.cfg)
	if err != nil {
		return err
	}
	f := &follower{
		s: s, t: s.t, c: c, events: make(chan *types.Envelope, eventRoom), broken: make(chan error, 1),
		looks: make(map[string]*look), found: make(chan *look, maxLooks), listed: make(chan listing, 1),
	}
	ctx, cancel := context.WithCancel(ctx)
	defer s.conn.Store(nil)
	defer f.beside.Wait()
	defer func() { _ = c.conn.Close() }()
	defer cancel()
	// Subscribed before listing, so that nothing falls between the two.
	f.beside.Go(func() { f.subscribe(ctx) })
	f.startListing(ctx)
	return f.loop(ctx)
}
