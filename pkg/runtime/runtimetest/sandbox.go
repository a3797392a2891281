package runtimetest

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !is() {
		if time.Now().After(deadline) {
			t.Fatalf("not in a minute: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func stats(t *testing.T, env Env, v *volume.Volume) volume.Report {
	t.Helper()
	report, err := env.Handler().Stats(t.Context(), v)
	if err != nil {
		t.Fatalf("Stats: %v", err)
	}
	return report
}

func boundTo(t *testing.T, env Env, v *volume.Volume, id string) {
	t.Helper()
	binding, bound := env.Handler().Binding(v)
	if !bound || binding.Sandbox != id || binding.Runtime == "" || binding.Since.IsZero() {
		t.Fatalf("bound to %+v (%v), want sandbox %s", binding, bound, id)
	}
}

// running publishes a volume and starts a sandbox that has it.
func running(t *testing.T, env Env) (*volume.Volume, Sandbox) {
	t.Helper()
	v := env.Volume("a")
	publish(t, env, v)
	return v, env.Start(t, v, "one")
}

func testStats(t *testing.T, env Env) {
	v, _ := running(t, env)
	report := stats(t, env, v)
	if len(report.Usage) == 0 {
		t.Fatal("no usage")
	}
	for _, u := range report.Usage {
		if u.Total <= 0 || u.Available < 0 || u.Used < 0 || u.Available > u.Total || u.Used > u.Total {
			t.Fatalf("usage %+v", u)
		}
	}
	boundTo(t, env, v, "one")
	retract(t, env, v)
	if _, bound := env.Handler().Binding(v); bound {
		t.Fatal("bound after Retract")
	}
}

func testNoSandbox(t *testing.T, env Env) {
	v := env.Volume("a")
	publish(t, env, v)
	_, err := env.Handler().Stats(t.Context(), v)
	wantKind(t, err, volume.NoSandbox)
	if !strings.Contains(err.Error(), v.Target) {
		t.Fatalf("the error does not name the volume: %v", err)
	}
	_, err = env.Handler().Resize(t.Context(), v, volume.Range{Required: 1 << 30})
	wantKind(t, err, volume.NoSandbox)
	if _, bound := env.Handler().Binding(v); bound {
		t.Fatal("bound without a sandbox")
	}
	inUse(t, env, v, "")
}

func inUse(t *testing.T, env Env, v *volume.Volume, want string) {
	t.Helper()
	got, err := env.Handler().InUse(t.Context(), v)
	if err != nil || got != want {
		t.Fatalf("InUse: %q, %v, want %q", got, err, want)
	}
}

func testAttempts(t *testing.T, env Env) {
	v := env.Volume("a")
	publish(t, env, v)
	first := env.Start(t, v, "first")
	stats(t, env, v)
	inUse(t, env, v, "first")
	first.Kill(t)
	inUse(t, env, v, "")
	_, err := env.Handler().Stats(t.Context(), v)
	wantKind(t, err, volume.NoSandbox)
	if _, bound := env.Handler().Binding(v); bound {
		t.Fatal("bound to a dead sandbox")
	}
	// The dead one's name sorts before the new one's, and after it.
	for _, id := range []string{"second", "another"} {
		sandbox := env.Start(t, v, id)
		stats(t, env, v)
		boundTo(t, env, v, id)
		inUse(t, env, v, id)
		sandbox.Kill(t)
	}
}

func testRestartFinds(t *testing.T, env Env) {
	v, _ := running(t, env)
	env.Restart(t)
	publish(t, env, v)
	stats(t, env, v)
	boundTo(t, env, v, "one")
}

func testErrors(t *testing.T, env Env) {
	v, sandbox := running(t, env)
	for name, c := range map[string]struct {
		set  func()
		kind volume.Kind
	}{
		"refuse": {sandbox.Refuse, volume.Refused},
		"babble": {sandbox.Babble, volume.Malformed},
	} {
		c.set()
		_, err := env.Handler().Stats(t.Context(), v)
		wantKind(t, err, c.kind)
		if !strings.Contains(err.Error(), v.Target) || !strings.Contains(err.Error(), "one") {
			t.Fatalf("%s: the error names not both volume and sandbox: %v", name, err)
		}
	}
	sandbox.Resume()
	stats(t, env, v)
}

func testHung(t *testing.T, env Env) {
	hung, well := env.Volume("hung"), env.Volume("well")
	publish(t, env, hung)
	publish(t, env, well)
	sandbox := env.Start(t, hung, "hanging")
	env.Start(t, well, "answering")
	sandbox.Hang()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 8)
	for range cap(ended) {
		go func() { _, err := env.Handler().Stats(ctx, hung); ended <- err }()
	}
	for range 20 {
		stats(t, env, well)
	}
	if len(ended) > 0 {
		t.Errorf("a hung sandbox delayed another volume until it was given up: %v", <-ended)
	}
	cancel()
	for range cap(ended) {
		wantKind(t, <-ended, volume.Canceled)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := env.Handler().Stats(ctx, hung)
	wantKind(t, err, volume.Timeout)
	inUse(t, env, hung, "hanging")
	sandbox.Resume()
	stats(t, env, hung)
}

func testResize(canResize bool) func(*testing.T, Env) {
	return func(t *testing.T, env Env) {
		v, _ := running(t, env)
		size, err := env.Handler().Resize(t.Context(), v, volume.Range{Required: 1 << 30})
		if canResize {
			if err != nil || size < 1<<30 {
				t.Fatalf("Resize: %d, %v", size, err)
			}
			return
		}
		wantKind(t, err, volume.Unsupported)
	}
}
