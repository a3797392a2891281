// Package runtimetest holds the tests that every runtime handler must pass. A
// handler's own tests call Run with a Fixture that builds it. It is for authors of
// handlers; a release may add tests to it.
package runtimetest

import (
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Fixture builds what a test needs.
type Fixture struct {
	// New builds a handler on fresh directories, with its Run running. Its
	// cleanup, by t.Cleanup, ends Run and every sandbox.
	New func(t *testing.T) Env
	// CanResize tells whether the handler's sandboxes can grow a filesystem.
	CanResize bool
}

// Env is one handler with its surroundings.
type Env interface {
	// Handler is the handler under test.
	Handler() runtime.Handler
	// Restart builds another handler on the same directories, as after a kill,
	// and ends the Run of the one before.
	Restart(t *testing.T) runtime.Handler
	// Volume makes a valid volume; each name gives another.
	Volume(name string) *volume.Volume
	// Projection is the volume's projection as the runtime sees it.
	Projection(t *testing.T, v *volume.Volume) (content string, exists bool)
	// PublishForeign publishes the volume as another program does.
	PublishForeign(t *testing.T, v *volume.Volume)
	// LeaveHalfPublished leaves what a kill in the middle of Publish leaves, and
	// CountLeftovers counts what of it there is.
	LeaveHalfPublished(t *testing.T, v *volume.Volume)
	CountLeftovers(t *testing.T) int
	// Start starts a sandbox that has the volume and has told so.
	Start(t *testing.T, v *volume.Volume, id string) Sandbox
}

// Sandbox is a running sandbox.
type Sandbox interface {
	// Hang makes it take requests and answer none, until Resume.
	Hang()
	Resume()
	// Refuse makes it answer every request with an error of its own, and Babble
	// with what cannot be read.
	Refuse()
	Babble()
	// Kill ends it without any good-bye.
	Kill(t *testing.T)
}
