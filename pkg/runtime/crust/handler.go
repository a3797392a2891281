// Package crust is the broker's side of the directory ABI: it shows volumes to the
// runtime handlers that speak it, such as crust-runc, learns from them which
// sandbox has a volume, and asks them about it over their socket or, where there
// is none, by their program.
package crust

import (
	"context"
	"errors"
	"sync"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
)

// Name is the handler's name.
const Name = "crust"

// Sandboxes is what the handler asks of the container runtime, from memory. It
// works without: the files of the ABI say the same, a little later.
type Sandboxes interface {
	// PodOf tells the pod of a sandbox, where that is known.
	PodOf(sandboxID string) (podUID string, known bool)
	// Ready tells whether the above can be relied on now.
	Ready() bool
}

// Handler is the runtime handler of the directory ABI. It works at once after New;
// Run adds the watch by which bindings show the moment they come to be, kept
// connections, and the clearing away of dead sandboxes.
type Handler struct {
	cfg       Config
	sandboxes Sandboxes // nil where no container runtime is followed
	log       *zap.Logger
	tree      *tree.Tree
	watch     *tree.Watch
	conns     *conns
	jobs      chan job

	mu      sync.RWMutex
	entries map[deferral.Key]*entry
}

var _ runtime.Handler = (*Handler)(nil)

// New makes the handler and removes what a kill left in TempDir.
func New(cfg Config, sandboxes Sandboxes, log *zap.Logger) (*Handler, error) {
	opened, err := tree.Open(tree.Config{
		Name: Name, Root: cfg.Root, Temp: cfg.TempDir, File: abi.InfoName, What: "the volume's mount information",
		Remedy: "remove the directory once no sandbox uses it", Log: log,
	})
	if err != nil {
		return nil, err
	}
	cfg.Root, cfg.TempDir = opened.Root, opened.Temp
	h := &Handler{
		cfg: cfg, sandboxes: sandboxes, log: log, tree: opened,
		jobs: make(chan job, maxJobs), entries: make(map[deferral.Key]*entry),
	}
	h.watch = tree.NewWatch(opened, (*follower)(h))
	h.conns = newConns(sockets{dirs: cfg.SocketDirs, owner: cfg.Owner})
	return h, nil
}

// Name is "crust".
func (h *Handler) Name() string { return Name }

// Abilities of crust-runc, which the ABI asks of every handler.
func (h *Handler) Abilities() deferral.Abilities {
	return deferral.Abilities{GrowsAtMount: true, HostMounts: true, SELinux: h.cfg.SELinux, SubPaths: true}
}

// Health tells what keeps the handler from working.
func (h *Handler) Health(context.Context) error {
	if err := h.tree.Health(); err != nil {
		return err
	}
	for _, path := range h.cfg.Programs {
		file, err := openProgram(path, h.cfg.Owner)
		if err != nil {
			return deferral.Errorf(deferral.KindOf(err), "crust: %w", err)
		}
		closeFile(file)
	}
	return h.watch.Health()
}

// Run watches the tree, keeps connections and clears dead sandboxes away until ctx
// ends.
func (h *Handler) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return h.watch.Run(ctx) })
	group.Go(func() error { h.work(ctx); return nil })
	group.Go(func() error { h.conns.run(ctx); return nil })
	return group.Wait()
}

func (h *Handler) changed(key deferral.Key) {
	if h.cfg.OnChange != nil {
		h.cfg.OnChange(key)
	}
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
	return deferral.Errorf(kind, "volume %s: the handler of sandbox %s %s: %w", v.Target, sandbox, text, err)
}
