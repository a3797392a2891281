//go:build system

package containerd

import (
	"context"
	"slices"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/sandbox"
)

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if is() {
			return
		}
	}
	t.Fatal("never: " + what)
}

func TestTrackerFollowsRealContainerd(t *testing.T) {
	d := newContainerd(t)
	gone := make(chan string, 16)
	tracker := sandbox.New(sandbox.Config{
		Socket: d.socket, Namespace: "k8s.io", OnGone: func(id string) { gone <- id },
	}, zap.NewNop())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- tracker.Run(ctx) }()
	defer func() { cancel(); must(t, <-done) }()
	eventually(t, "ready", tracker.Ready)
	is := func(want ...string) func() bool {
		return func() bool { return slices.Equal(tracker.OfPod("pod-1"), want) }
	}

	d.runSandbox("sb-1", "pod-1")
	t.Cleanup(func() { d.removeSandbox("sb-1") })
	eventually(t, "sb-1 is seen", is("sb-1"))

	must(t, syscall.Kill(d.pid("sb-1"), syscall.SIGKILL))
	eventually(t, "a killed sandbox is gone", is())
	if id := <-gone; id != "sb-1" {
		t.Errorf("told that %s is gone", id)
	}

	d.runSandbox("sb-2", "pod-1")
	t.Cleanup(func() { d.removeSandbox("sb-2") })
	eventually(t, "the re-created sandbox is found", is("sb-2"))

	// Containerd dies; sandboxes do not. One that dies meanwhile is missed, and
	// found out when containerd is back.
	d.runSandbox("sb-3", "pod-2")
	t.Cleanup(func() { d.removeSandbox("sb-3") })
	eventually(t, "sb-3 is seen", func() bool { return slices.Equal(tracker.OfPod("pod-2"), []string{"sb-3"}) })
	victim := d.pid("sb-3")
	d.kill()
	eventually(t, "not ready", func() bool { return !tracker.Ready() })
	if !is("sb-2")() {
		t.Error("a living sandbox was forgotten with containerd")
	}
	must(t, syscall.Kill(victim, syscall.SIGKILL))
	d.start()
	eventually(t, "ready again", tracker.Ready)
	eventually(t, "sb-3 is gone", func() bool { return len(tracker.OfPod("pod-2")) == 0 })
	eventually(t, "sb-2 lives", is("sb-2"))
}
