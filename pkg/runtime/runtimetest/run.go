// Package runtimetest holds the tests that every runtime handler must pass. A
// handler's own tests call Run with a Fixture that builds it. It is for authors of
// handlers; a release may add tests to it.
package runtimetest

import (
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Run runs the whole suite.
func Run(t *testing.T, f Fixture) {
	for _, c := range []struct {
		name string
		test func(*testing.T, Env)
	}{
		{"publish and retract are idempotent", testIdempotent},
		{"a changed volume is published again", testRepublish},
		{"leftovers of a kill are removed", testLeftovers},
		{"orphans are found", testOrphans},
		{"a foreign volume is served and not touched", testAdopted},
		{"a canceled call does nothing", testCanceledBefore},
		{"concurrent use", testConcurrent},
		{"stats", testStats},
		{"no sandbox", testNoSandbox},
		{"a binding for each sandbox attempt", testAttempts},
		{"a restart finds the sandbox", testRestartFinds},
		{"a sandbox's errors have their kinds", testErrors},
		{"a hung sandbox hurts only itself, and a caller can go away", testHung},
		{"resize", testResize(f.CanResize)},
	} {
		t.Run(c.name, func(t *testing.T) { runOne(t, f, c.test) })
	}
}

func runOne(t *testing.T, f Fixture, test func(*testing.T, Env)) {
	goroutines := goleak.IgnoreCurrent()
	before := openFiles(t)
	t.Run("", func(t *testing.T) {
		env := f.New(t)
		if err := env.Handler().Health(t.Context()); err != nil {
			t.Fatalf("Health: %v", err)
		}
		test(t, env)
	})
	goleak.VerifyNone(t, goroutines)
	// The poller's own descriptors come with the first use and stay.
	deadline := time.Now().Add(2 * time.Second)
	for openFiles(t) > before+2 {
		if time.Now().After(deadline) {
			t.Fatalf("%d open files, %d before", openFiles(t), before)
		}
		time.Sleep(time.Millisecond)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// Fixture builds what a test needs.
type Fixture struct {
	// New builds a handler on fresh directories, with its Run running. Its
	// cleanup, by t.Cleanup, ends Run and every sandbox.
	New func(t *testing.T) Env
	// CanResize reports whether the handler's sandboxes can grow a filesystem.
	CanResize bool
}

// Env is one handler with its surroundings.
type Env interface {
	// Handler is the handler under test.
	Handler() runtime.Handler
	// Restart ends the Run of the handler and builds another one on the same directories,
	// as after a kill.
	Restart(t *testing.T) runtime.Handler
	// Volume returns a valid volume, a different one for each name.
	Volume(name string) *volume.Volume
	// Projection returns the volume's projection as the runtime sees it.
	Projection(t *testing.T, v *volume.Volume) (content string, exists bool)
	// PublishForeign publishes the volume as another program does.
	PublishForeign(t *testing.T, v *volume.Volume)
	// LeaveHalfPublished leaves what a kill in the middle of Publish leaves, and
	// CountLeftovers counts what of it there is.
	LeaveHalfPublished(t *testing.T, v *volume.Volume)
	CountLeftovers(t *testing.T) int
	// Start starts a sandbox that has the volume and has left its id.
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
	// Kill ends it as a kill does.
	Kill(t *testing.T)
}
