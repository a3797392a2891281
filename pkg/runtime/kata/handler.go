// Package kata hands volumes to Kata Containers, to its Go runtime and to
// runtime-rs, as direct-assigned volumes, and talks to their sandboxes.
//
// What Kata's code does, where its documents say otherwise, is in the comments
// of the files that rely on it.
package kata

import (
	"context"
	"errors"
	"sync"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
)

// Name is the handler's name.
const Name = "kata"

// Sandboxes is what the handler asks of the container runtime. Its answers
// supplement Kata's own files; runtime-rs cannot be served without them.
type Sandboxes interface {
	// OfPod lists the pod's live sandboxes, the newest first, from memory.
	OfPod(podUID string) []string
	// PodOf tells the pod of a sandbox, where that is known.
	PodOf(sandboxID string) (podUID string, known bool)
	// Destinations lists where the sandbox's containers mount source.
	Destinations(ctx context.Context, sandboxID, source string) ([]string, error)
	// ContainerIDs lists the sandbox's containers.
	ContainerIDs(ctx context.Context, sandboxID string) ([]string, error)
	// Ready tells whether the above can be relied on now.
	Ready() bool
}

// Handler is the Kata runtime handler. It works at once after New; Run adds
// the watch by which bindings show the moment they come to be, and kept
// connections.
type Handler struct {
	cfg       Config
	sandboxes Sandboxes
	log       *zap.Logger
	tree      *tree.Tree
	watch     *tree.Watch
	pool      *pool

	mu      sync.RWMutex
	entries map[deferral.Key]*entry
	adopted map[deferral.Key]*deferral.Volume
}

var _ runtime.Handler = (*Handler)(nil)

// New makes the handler and removes what a kill left in TempDir.
func New(cfg Config, sandboxes Sandboxes, log *zap.Logger) (*Handler, error) {
	opened, err := openTree(&cfg, log)
	if err != nil {
		return nil, err
	}
	h := &Handler{
		cfg: cfg, sandboxes: sandboxes, log: log, tree: opened,
		pool:    newPool(),
		entries: make(map[deferral.Key]*entry),
		adopted: make(map[deferral.Key]*deferral.Volume),
	}
	h.watch = tree.NewWatch(opened, (*follower)(h))
	return h, nil
}

// Name is "kata".
func (h *Handler) Name() string { return Name }

// Health tells what keeps the handler from working.
func (h *Handler) Health(context.Context) error {
	if err := h.tree.Health(); err != nil {
		return err
	}
	return h.watch.Health()
}

func contextError(v *deferral.Volume, sandbox string, err error) error {
	kind := deferral.Timeout
	text := "did not answer in time; it may be overloaded or hung"
	if errors.Is(err, context.Canceled) {
		kind, text = deferral.Canceled, "was not waited for: the caller went away"
	}
	if sandbox == "" {
		return deferral.Errorf(kind, "volume %s: the call ended before anything was done: %w", v.Target, err)
	}
	return deferral.Errorf(kind, "volume %s: Kata sandbox %s %s: %w", v.Target, sandbox, text, err)
}
