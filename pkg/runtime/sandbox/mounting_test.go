package sandbox

import (
	"context"
	"fmt"
	"slices"
	"testing"

	tasktypes "github.com/containerd/containerd/api/types/task"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func mountSpec(sandbox, source string) string {
	return fmt.Sprintf(`{"annotations":{%q:%q},"mounts":[{"source":%q,"destination":"/data"}]}`, sandboxAnnotation, sandbox, source)
}

func wantMounting(t *testing.T, source interface {
	Mounting(ctx context.Context, sources ...string) ([]string, error)
}, path string, want ...string) {
	t.Helper()
	got, err := source.Mounting(t.Context(), "/another", path)
	slices.Sort(got)
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%s is mounted by %q, %v, want %q", path, got, err, want)
	}
}

func TestMounting(t *testing.T) {
	fake := newFake(t)
	fake.start()
	fake.put("sb-1", "pod-1", kindSandbox, "", mountSpec("sb-1", "/v"))
	fake.put("c-1", "pod-1", "container", "sb-1", mountSpec("sb-1", "/v/"))
	fake.put("sb-2", "pod-2", kindSandbox, "", "{}")
	fake.put("c-2", "pod-2", "container", "", mountSpec("sb-2", "/v")) // made before an upgrade
	fake.put("c-3", "pod-2", "container", "", mountSpec("sb-2", "/w"))
	fake.put("sb-3", "pod-3", kindSandbox, "", "{}")
	fake.states["sb-3"] = tasktypes.Status_STOPPED
	fake.put("c-4", "pod-3", "container", "sb-3", mountSpec("sb-3", "/v"))
	fake.states["c-4"] = tasktypes.Status_STOPPED
	fake.put("c-5", "pod-5", "container", "sb-5", mountSpec("sb-5", "/s")) // its sandbox is no container: sandboxer = "shim"
	fake.put("c-6", "pod-6", "container", "sb-6", mountSpec("sb-6", "/s"))
	fake.states["c-6"] = tasktypes.Status_STOPPED
	fake.put("alone", "", "", "", `{"mounts":[{"source":"/x"}]}`) // not of Kubernetes: ctr made it
	tracker, _ := startTracker(t, fake)
	check.Eventually(t, "ready", tracker.Ready)
	wantMounting(t, tracker, "/v", "sb-1", "sb-2")
	wantMounting(t, tracker, "/x", "alone")
	wantMounting(t, tracker, "/s", "sb-5")
	wantMounting(t, tracker, "/nobody")
	fake.put("odd", "pod-1", "container", "sb-1", "{broken")
	wantMounting(t, tracker, "/v", "sb-1", "sb-2")
	wantMounting(t, tracker, "/nobody") // nobody waits for a container of somebody else
	fake.stop()
	check.Eventually(t, "not ready", func() bool { return !tracker.Ready() })
	if _, err := tracker.Mounting(t.Context(), "/nobody"); volume.KindOf(err) != volume.NoSandbox {
		t.Errorf("without containerd: %v", err)
	}
}

// patient answers a question when its caller stops waiting for it.
type patient struct{ asker }

func (patient) mounting(ctx context.Context, _ []string) ([]string, error) {
	if _, bounded := ctx.Deadline(); !bounded {
		return nil, nil
	}
	return nil, context.DeadlineExceeded
}

// TestMountingEnds though its caller would wait for ever, as reconcile does.
func TestMountingEnds(t *testing.T) {
	tracker := &Tracker{by: patient{}}
	if _, err := tracker.Mounting(t.Context(), "/v"); err == nil {
		t.Error("a container runtime that hangs would be waited for without end")
	}
}

func TestCRIMounting(t *testing.T) {
	fake := newFakeRuntime(t)
	fake.start()
	fake.put("sb-1", "pod-1", "kata")
	fake.put("sb-2", "pod-2", "kata")
	fake.end("sb-2")
	fake.contain("c-1", "sb-1", &runtimeapi.Mount{HostPath: "/v", ContainerPath: "/data"})
	fake.contain("c-2", "sb-2", &runtimeapi.Mount{HostPath: "/v", ContainerPath: "/data"})
	tracker, _ := startCRI(t, fake, nil)
	check.Eventually(t, "ready", tracker.Ready)
	wantMounting(t, tracker, "/v", "sb-1")
	wantMounting(t, tracker, "/nobody")
	fake.put("sb-3", "", "kata") // newer than the last listing, and not kubelet's: crictl made it
	fake.contain("c-3", "sb-3", &runtimeapi.Mount{HostPath: "/v", ContainerPath: "/data"})
	wantMounting(t, tracker, "/v", "sb-1", "sb-3")
	fake.stop()
	check.Eventually(t, "not ready", func() bool { return !tracker.Ready() })
	if _, err := tracker.Mounting(t.Context(), "/nobody"); volume.KindOf(err) != volume.NoSandbox {
		t.Errorf("without the runtime: %v", err)
	}
}

// A container runtime that has just started may answer before it has read its own
// state: an empty list is believed when it is given twice.
func TestAnEmptyFirstAnswerIsDoubted(t *testing.T) {
	fake := newFake(t)
	fake.start()
	tracker, _ := startTracker(t, fake)
	check.Eventually(t, "ready", tracker.Ready)
	if n := fake.listings(); n != 2 {
		t.Errorf("ready after %d listings", n)
	}
	fake.stop()
	check.Eventually(t, "not ready", func() bool { return !tracker.Ready() })
	fake.put("sb-1", "pod-1", kindSandbox, "", "{}")
	fake.start()
	check.Eventually(t, "an answer that is not empty is believed at once", tracker.Ready)
	if n := fake.listings(); n > 4 { // a late start can have failed before
		t.Errorf("ready after %d listings", n)
	}
}

func TestCRIAnEmptyFirstAnswerIsDoubted(t *testing.T) {
	fake := newFakeRuntime(t)
	fake.start()
	tracker, told := startCRI(t, fake, nil)
	check.Eventually(t, "ready", tracker.Ready)
	if n := fake.listings(); n < 2 {
		t.Errorf("ready after %d listings", n)
	}
	fake.put("sb-1", "pod-1", "kata")
	fake.tell("sb-1", runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT)
	check.Eventually(t, "sb-1", has(tracker, "pod-1", "sb-1"))
	fake.stop()
	check.Eventually(t, "not ready", func() bool { return !tracker.Ready() })
	fake.mu.Lock()
	delete(fake.sandboxes, "sb-1")
	before := fake.lists
	fake.mu.Unlock()
	fake.start()
	check.Eventually(t, "gone", func() bool { return told.has("gone sb-1") })
	if n := fake.listings() - before; n < 2 {
		t.Errorf("the sandbox was forgotten after %d empty listings", n)
	}
}
