package runtimetest

import (
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
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
		{"a hung sandbox hurts only itself", testHung},
		{"a caller can go away", testCancel},
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
