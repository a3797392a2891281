//go:build system

package containerd

import (
	"context"
	"slices"
	"syscall"
	"testing"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/sandbox"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// follow runs a tracker until the test ends.
func follow(t *testing.T, d *direct) (tracker *sandbox.Tracker, gone chan string) {
	t.Helper()
	gone = make(chan string, 16)
	tracker = sandbox.New(sandbox.Config{
		Socket: d.Socket, Namespace: "k8s.io", OnGone: func(id string) { gone <- id },
	}, zap.NewNop())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- tracker.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		check.Must(t, <-done)
	})
	return tracker, gone
}

func TestTrackerFollowsRealContainerd(t *testing.T) {
	d := newDirect(t)
	tracker, gone := follow(t, d)
	check.Eventually(t, "ready", tracker.Ready)
	is := func(want ...string) func() bool {
		return func() bool { return slices.Equal(tracker.OfPod("pod-1"), want) }
	}

	d.runSandbox("sb-1", "pod-1")
	t.Cleanup(func() { d.removeSandbox("sb-1") })
	check.Eventually(t, "sb-1 is seen", is("sb-1"))

	check.Must(t, syscall.Kill(d.pid("sb-1"), syscall.SIGKILL))
	check.Eventually(t, "a killed sandbox is gone", is())
	if id := <-gone; id != "sb-1" {
		t.Errorf("told that %s is gone", id)
	}

	d.runSandbox("sb-2", "pod-1")
	t.Cleanup(func() { d.removeSandbox("sb-2") })
	check.Eventually(t, "the re-created sandbox is found", is("sb-2"))

	// Containerd dies; sandboxes do not. One that dies meanwhile is missed, and
	// found out when containerd is back.
	d.runSandbox("sb-3", "pod-2")
	t.Cleanup(func() { d.removeSandbox("sb-3") })
	check.Eventually(t, "sb-3 is seen", func() bool { return slices.Equal(tracker.OfPod("pod-2"), []string{"sb-3"}) })
	victim := d.pid("sb-3")
	d.Process.Kill()
	check.Eventually(t, "not ready", func() bool { return !tracker.Ready() })
	if !is("sb-2")() {
		t.Error("a living sandbox was forgotten with containerd")
	}
	check.Must(t, syscall.Kill(victim, syscall.SIGKILL))
	check.Must(t, d.Process.Start())
	check.Eventually(t, "ready again", tracker.Ready)
	check.Eventually(t, "sb-3 is gone", func() bool { return len(tracker.OfPod("pod-2")) == 0 })
	check.Eventually(t, "sb-2 lives", is("sb-2"))
}

func TestContainersOfASandboxInRealContainerd(t *testing.T) {
	d := newDirect(t)
	tracker, _ := follow(t, d)
	d.runSandbox("sb-1", "pod-1")
	t.Cleanup(func() { d.removeSandbox("sb-1") })
	d.addContainer("c-1", "sb-1", "pod-1", "/volume", "/data")
	d.addContainer("c-2", "sb-1", "pod-1", "/other", "/elsewhere")
	d.addContainer("c-old", "sb-0", "pod-1", "/volume", "/of-a-dead-sandbox")
	d.addContainer("c-3", "sb-9", "pod-9", "/volume", "/of-another-pod")
	check.Eventually(t, "sb-1 is seen", func() bool { return len(tracker.OfPod("pod-1")) == 1 })
	ids, err := tracker.ContainerIDs(t.Context(), "sb-1")
	check.Must(t, err)
	slices.Sort(ids)
	if !slices.Equal(ids, []string{"c-1", "c-2", "sb-1"}) {
		t.Errorf("its containers are %q", ids)
	}
	destinations, err := tracker.Destinations(t.Context(), "sb-1", "/volume")
	check.Must(t, err)
	if !slices.Equal(destinations, []string{"/data"}) {
		t.Errorf("the volume is mounted at %q", destinations)
	}
}

// A shim that hangs is not a sandbox that went.
func TestAHungShimStaysLiveAtListing(t *testing.T) {
	d := newDirect(t)
	d.runSandbox("sb-1", "pod-1")
	t.Cleanup(func() { d.removeSandbox("sb-1") })
	d.runSandbox("sb-2", "pod-2")
	t.Cleanup(func() { d.removeSandbox("sb-2") })
	check.Must(t, syscall.Kill(d.pid("sb-2"), syscall.SIGKILL))
	shim, err := rig.Parent(d.pid("sb-1"))
	check.Must(t, err)
	check.Must(t, syscall.Kill(shim, syscall.SIGSTOP))
	t.Cleanup(func() { _ = syscall.Kill(shim, syscall.SIGCONT) })
	tracker, _ := follow(t, d)
	check.Eventually(t, "ready", tracker.Ready)
	if got := tracker.OfPod("pod-1"); !slices.Equal(got, []string{"sb-1"}) {
		t.Errorf("the sandbox whose shim hangs: %q", got)
	}
	if got := tracker.OfPod("pod-2"); len(got) != 0 {
		t.Errorf("the sandbox that was killed: %q", got)
	}
}
