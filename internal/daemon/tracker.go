package daemon

import (
	"context"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/config"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/kata"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/sandbox"
)

// tracker follows the container runtime's sandboxes.
type tracker interface {
	Run(ctx context.Context) error
	kata.Sandboxes
	LastError() error
}

// trackerEvents are what a tracker reports and asks.
type trackerEvents struct {
	added func(podUID, id string)
	gone  func(id string)
	// busy is true while sandboxes have volumes of ours.
	busy func() bool
}

// newTracker gives nil where no container runtime is configured.
func newTracker(cfg *config.Config, events trackerEvents, log *zap.Logger) tracker {
	switch {
	case cfg.Containerd.Socket != "":
		return sandbox.New(sandbox.Config{
			Socket: cfg.Containerd.Socket, Namespace: cfg.Containerd.Namespace, OnAdded: events.added, OnGone: events.gone,
		}, log.Named("containerd"))
	case cfg.CRI.Socket != "":
		return sandbox.NewCRI(sandbox.Config{
			Socket: cfg.CRI.Socket, OnAdded: events.added, OnGone: events.gone, Busy: events.busy,
		}, log.Named("cri"))
	}
	return nil
}

// polledFinding tells of a container runtime that offers no events.
func polledFinding(of tracker) []string {
	if by, ok := of.(interface{ Polled() bool }); !ok || !by.Polled() {
		return nil
	}
	return []string{"the container runtime tells of no changes and is asked for its sandboxes every 2 s, so that the death of one is known " +
		"up to 2 s late; for CRI-O set enable_pod_events = true in [crio.runtime], and restart it"}
}
