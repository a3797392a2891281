package daemon

import (
	"context"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
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

// polledFinding reports a container runtime that offers no events.
func polledFinding(of tracker) []string {
	if of == nil || !of.Polled() {
		return nil
	}
	return []string{"the container runtime tells of no changes and is asked for its sandboxes every 2 s, so that the death of one is known " +
		"up to 2 s late; for CRI-O set enable_pod_events = true in [crio.runtime], and restart it"}
}
