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
	if cfg.Containerd.Socket == "" {
		return nil
	}
	return sandbox.New(sandbox.Config{
		Socket: cfg.Containerd.Socket, Namespace: cfg.Containerd.Namespace,
		// The handler is made after the tracker, and before the tracker runs.
		OnAdded: func(podUID, id string) { d.kata.SandboxAdded(podUID, id) },
		OnGone:  func(id string) { d.kata.SandboxGone(id) },
	}, d.log.Named("containerd"))
}
