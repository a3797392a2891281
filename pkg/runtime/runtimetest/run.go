// Package runtimetest holds the tests that every runtime handler must pass. A handler's own tests call Run with a
// Fixture that builds it. It is for authors of handlers; a release may add tests to it.
package runtimetest

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
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
	// Restart ends the Run of the handler and builds another one on the same directories, as after a kill.
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
	// Refuse makes it answer every request with an error of its own, and Babble with what cannot be read.
	Refuse()
	Babble()
	// Kill ends it as a kill does.
	Kill(t *testing.T)
}

func publish(t *testing.T, env Env, v *volume.Volume) string {
	t.Helper()
	if err := env.Handler().Check(v); err != nil {
		t.Fatalf("Check: %v", err)
	}
	if _, err := env.Handler().Publish(t.Context(), v); err != nil {
		t.Fatalf("Publish: %v", err)
	}
	content, exists := env.Projection(t, v)
	if !exists {
		t.Fatal("no projection after Publish")
	}
	return content
}

func retract(t *testing.T, env Env, v *volume.Volume) {
	t.Helper()
	if err := env.Handler().Retract(t.Context(), v); err != nil {
		t.Fatalf("Retract: %v", err)
	}
	if _, exists := env.Projection(t, v); exists {
		t.Fatal("a projection after Retract")
	}
}

func wantKind(t *testing.T, err error, kinds ...volume.Kind) {
	t.Helper()
	if err == nil || !slices.Contains(kinds, volume.KindOf(err)) {
		t.Fatalf("error %v of kind %v, want one of %v", err, volume.KindOf(err), kinds)
	}
}

func testIdempotent(t *testing.T, env Env) {
	v := env.Volume("a")
	if changed, err := env.Handler().Publish(t.Context(), v); err != nil || !changed {
		t.Fatalf("the first Publish: changed %v, %v", changed, err)
	}
	first := publish(t, env, v)
	if changed, err := env.Handler().Publish(t.Context(), v); err != nil || changed {
		t.Fatalf("one more Publish: changed %v, %v", changed, err)
	}
	if second := publish(t, env, v); second != first {
		t.Fatalf("the second Publish changed the projection:\n%s\n%s", first, second)
	}
	retract(t, env, v)
	retract(t, env, v)
	publish(t, env, v)
	retract(t, env, v)
}

func testRepublish(t *testing.T, env Env) {
	v := env.Volume("a")
	first := publish(t, env, v)
	changed := *v
	changed.ReadOnly = true
	changed.MountFlags = append(slices.Clone(v.MountFlags), "noatime")
	if second := publish(t, env, &changed); second == first {
		t.Fatal("Publish of a changed volume changed nothing")
	}
	if third := publish(t, env, v); third != first {
		t.Fatal("Publish of the first form did not bring it back")
	}
	retract(t, env, v)
}

func testLeftovers(t *testing.T, env Env) {
	v := env.Volume("a")
	env.LeaveHalfPublished(t, v)
	if env.CountLeftovers(t) == 0 {
		t.Fatal("the fixture leaves nothing behind")
	}
	if _, exists := env.Projection(t, v); exists {
		t.Fatal("a half-made projection shows")
	}
	env.Restart(t)
	if n := env.CountLeftovers(t); n != 0 {
		t.Fatalf("%d leftovers after a restart", n)
	}
	publish(t, env, v)
	retract(t, env, v)
}

func testOrphans(t *testing.T, env Env) {
	kept, lost, foreign := env.Volume("kept"), env.Volume("lost"), env.Volume("foreign")
	publish(t, env, kept)
	publish(t, env, lost)
	env.PublishForeign(t, foreign)
	handler := env.Restart(t)
	orphans, err := handler.Orphans(func(key volume.Key) bool { return key == kept.Key })
	if err != nil {
		t.Fatalf("Orphans: %v", err)
	}
	if len(orphans) != 1 || orphans[0].Key != lost.Key || orphans[0].ResolvedTarget != lost.ResolvedTarget {
		t.Fatalf("Orphans: %+v, want that of %s alone", orphans, lost.Target)
	}
	if err := handler.Retract(t.Context(), orphans[0]); err != nil {
		t.Fatalf("Retract of an orphan: %v", err)
	}
	if _, exists := env.Projection(t, lost); exists {
		t.Fatal("the orphan is still there")
	}
	if _, exists := env.Projection(t, kept); !exists {
		t.Fatal("the known volume went with the orphan")
	}
}

func testAdopted(t *testing.T, env Env) {
	v := env.Volume("foreign")
	env.PublishForeign(t, v)
	before, _ := env.Projection(t, v)
	eventually(t, "the foreign volume is adopted", func() bool {
		list := env.Handler().Adopted()
		return len(list) == 1 && list[0].Key == v.Key && list[0].Adopted && list[0].ResolvedTarget == v.ResolvedTarget
	})
	changed := *v
	changed.ReadOnly = !v.ReadOnly
	_, err := env.Handler().Publish(t.Context(), &changed)
	wantKind(t, err, volume.Conflict)
	if err := env.Handler().Retract(t.Context(), v); err != nil {
		t.Fatalf("Retract of a foreign volume: %v", err)
	}
	if after, exists := env.Projection(t, v); !exists || after != before {
		t.Fatal("a foreign volume was touched")
	}
	env.Start(t, v, "adopting")
	if _, err := env.Handler().Stats(t.Context(), env.Handler().Adopted()[0]); err != nil {
		t.Fatalf("Stats of an adopted volume: %v", err)
	}
}

func testCanceledBefore(t *testing.T, env Env) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	v := env.Volume("a")
	_, err := env.Handler().Publish(ctx, v)
	wantKind(t, err, volume.Canceled)
	if _, exists := env.Projection(t, v); exists {
		t.Fatal("a canceled Publish published")
	}
	_, err = env.Handler().Stats(ctx, v)
	wantKind(t, err, volume.Canceled)
}

func testConcurrent(t *testing.T, env Env) {
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			v := env.Volume(fmt.Sprintf("v%d", i))
			for range 20 {
				_, err := env.Handler().Publish(t.Context(), v)
				if err == nil {
					_, err = env.Handler().InUse(t.Context(), v)
				}
				if err == nil {
					err = env.Handler().Retract(t.Context(), v)
				}
				if err != nil {
					t.Errorf("volume %d: %v", i, err)
					return
				}
				env.Handler().Binding(v)
				env.Handler().Adopted()
			}
		})
	}
	wg.Wait()
	if n := env.CountLeftovers(t); n != 0 {
		t.Fatalf("%d leftovers", n)
	}
}
