package daemon

import (
	"github.com/crust-proxy/crust-proxy/internal/config"
	"github.com/crust-proxy/crust-proxy/internal/run"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/kata"
)

// tracker follows the container runtime's sandboxes.
type tracker interface {
	run.Component
	kata.Sandboxes
	LastError() error
}

// newTracker gives nil where no container runtime is configured.
func (d *daemon) newTracker(*config.Config) tracker { return nil }
