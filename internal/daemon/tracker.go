package daemon

import (
	"github.com/crust-proxy/crust-proxy/internal/config"
	"github.com/crust-proxy/crust-proxy/internal/run"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/kata"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/sandbox"
)

// tracker follows the container runtime's sandboxes.
type tracker interface {
	run.Component
	kata.Sandboxes
	LastError() error
}

// newTracker gives nil where no container runtime is configured.
func (d *daemon) newTracker(cfg *config.Config) tracker {
	// The handlers are made after the tracker, and before the tracker runs.
	added := func(podUID, id string) { d.handlers.sandboxAdded(podUID, id) }
	gone := func(id string) { d.handlers.sandboxGone(id) }
	switch {
	case cfg.Containerd.Socket != "":
		return sandbox.New(sandbox.Config{
			Socket: cfg.Containerd.Socket, Namespace: cfg.Containerd.Namespace, OnAdded: added, OnGone: gone,
		}, d.log.Named("containerd"))
	case cfg.CRI.Socket != "":
		return sandbox.NewCRI(sandbox.CRIConfig{
			Socket: cfg.CRI.Socket, OnAdded: added, OnGone: gone,
			Busy: func() bool { return len(d.broker.List()) > 0 },
		}, d.log.Named("cri"))
	}
	return nil
}
