package daemon

import (
	"context"
	"fmt"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/kata"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/sandbox"
)

// tracker follows the container runtime's sandboxes.
type tracker interface {
	Run(ctx context.Context) error
	kata.Sandboxes
	Polled() bool
}

// newTracker completes the configuration with the container runtime. It returns nil if none
// is configured.
func newTracker(cfg *config.Config, of sandbox.Config, log *zap.Logger) tracker {
	switch {
	case cfg.Containerd.Socket != "":
		of.Socket, of.Namespace = cfg.Containerd.Socket, cfg.Containerd.Namespace
		return sandbox.New(of, log.Named("containerd"))
	case cfg.CRI.Socket != "":
		of.Socket = cfg.CRI.Socket
		return sandbox.NewCRI(of, log.Named("cri"))
	}
	return nil
}

// followed reports how well the container runtime's sandboxes can be followed.
type followed struct{ tracker }

func (f followed) findings() []string {
	var out []string
	if !f.Ready() {
		out = append(out, fmt.Sprintf("sandboxes cannot be followed (%v): those of runtime-rs are not found", f.LastError()))
	}
	if f.Polled() {
		out = append(out, "the container runtime tells of no changes and is asked for its sandboxes every 2 s, so that the death of one is known "+
			"up to 2 s late; for CRI-O set enable_pod_events = true in [crio.runtime], and restart it")
	}
	return out
}

func (f followed) measure(_ context.Context, into *telemetry.NodeState) {
	into.Sources["sandboxes"] = f.Ready()
}
