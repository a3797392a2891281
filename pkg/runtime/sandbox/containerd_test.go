package sandbox

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	eventtypes "github.com/containerd/containerd/api/events"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func onContainerd(t *testing.T, test func(t *testing.T, fake *fakeContainerd)) {
	synctest.Test(t, func(t *testing.T) { test(t, newFake()) })
}

// A shim that cannot be reached is not a sandbox that went, and hides no other one. Only a
// task that has stopped, or none, is the end of a sandbox.
func TestUnreachableShimHidesNobody(t *testing.T) {
	onContainerd(t, func(t *testing.T, fake *fakeContainerd) {
		for _, id := range []string{"running", "hung", "paused", "away", "dead", "taskless"} {
			fake.put(id, "pod-"+id)
		}
		fake.states["hung"], fake.states["paused"] = tasktypes.Status_UNKNOWN, tasktypes.Status_PAUSED
		fake.shimless["away"] = true
		fake.states["dead"], fake.taskless["taskless"] = tasktypes.Status_STOPPED, true
		tracker, _ := ready(t, fake)
		for id, want := range map[string]bool{"running": true, "hung": true, "paused": true, "away": true, "dead": false, "taskless": false} {
			if _, known := tracker.PodOf(id); known != want {
				t.Errorf("%s lives: %v", id, known)
			}
		}
	})
}

// An exec that ends, an event of another namespace, such as Docker's, and one that cannot be
// read end no sandbox. A container that is deleted does.
func TestEventsThatEndNothing(t *testing.T) {
	onContainerd(t, func(t *testing.T, fake *fakeContainerd) {
		fake.put("sb-1", "pod-1")
		tracker, told := ready(t, fake)
		fake.tell("/tasks/exit", &eventtypes.TaskExit{ContainerID: "sb-1", ID: "exec-7"})
		raw, err := proto.Marshal(&eventtypes.TaskExit{ContainerID: "sb-1", ID: "sb-1"})
		check.Must(t, err)
		fake.tellRaw("moby", "/tasks/exit", raw)
		fake.tellRaw("k8s.io", "/tasks/start", []byte{0xff, 0xff})
		fake.tellRaw("k8s.io", strings.Repeat("x", 4096), nil)
		fake.tell("/tasks/start", &eventtypes.TaskStart{ContainerID: "not-there"})
		fake.begin("sb-2", "pod-2")
		check.Eventually(t, "sb-2", func() bool { return told.has("added pod-2 sb-2") })
		if !has(tracker, "pod-1", "sb-1")() {
			t.Error("sb-1 is gone")
		}
		fake.tell("/containers/delete", &eventtypes.ContainerDelete{ID: "sb-1"})
		check.Eventually(t, "sb-1 gone", has(tracker, "pod-1"))
	})
}

// A query that hangs delays no other sandbox, and its own sandbox is not taken for live once
// it has gone.
func TestAHangingQuestionDelaysNobody(t *testing.T) {
	onContainerd(t, func(t *testing.T, fake *fakeContainerd) {
		fake.put("sb-1", "pod-1")
		tracker, told := ready(t, fake)
		fake.mu.Lock()
		fake.hanging["stuck"] = true
		fake.mu.Unlock()
		fake.begin("stuck", "pod-1")
		begin := time.Now()
		fake.end("sb-1")
		fake.begin("sb-2", "pod-2")
		check.Eventually(t, "the others", func() bool { return told.has("gone sb-1") && told.has("added pod-2 sb-2") })
		if took := time.Since(begin); took > time.Second {
			t.Errorf("they waited for the one that hangs: %v", took)
		}
		fake.drop("stuck")
		fake.tell("/containers/delete", &eventtypes.ContainerDelete{ID: "stuck"})
		fake.begin("sb-3", "pod-3")
		check.Eventually(t, "sb-3", func() bool { return told.has("added pod-3 sb-3") })
		if _, known := tracker.PodOf("stuck"); known || !tracker.Ready() {
			t.Errorf("a sandbox that went while it was asked about is live: %v; %v", known, tracker.LastError())
		}
	})
}

// What events told while a listing ran is newer than the listing.
func TestEventsWinOverTheListingUnderWay(t *testing.T) {
	tracker := New(Config{}, zap.NewNop())
	f := &follower{t: tracker, c: &client{}, touched: make(map[string]bool)}
	tracker.add(sandbox{id: "stays", pod: "pod-1"})
	tracker.add(sandbox{id: "missed", pod: "pod-1"})
	f.touch("stays") // it started after the listing had been made
	f.gone("went")   // and this one went
	live := map[string]sandbox{"went": {id: "went", pod: "pod-1"}, "new": {id: "new", pod: "pod-1"}}
	check.Must(t, f.endListing(live, nil))
	got := tracker.OfPod("pod-1")
	slices.Sort(got)
	if !slices.Equal(got, []string{"new", "stays"}) {
		t.Errorf("got %q", got)
	}
}

// Containers whose sandbox is no container, or that kubelet did not make, have a volume as
// long as their own tasks run. One whose spec cannot be read is nobody's.
func TestMountingBesideKubelet(t *testing.T) {
	onContainerd(t, func(t *testing.T, fake *fakeContainerd) {
		fake.put("sb-2", "pod-2")
		fake.make("c-2", "pod-2", "container", "", mountSpec("sb-2", "/v"))     // made before an upgrade
		fake.make("c-5", "pod-5", "container", "sb-5", mountSpec("sb-5", "/s")) // sandboxer = "shim"
		fake.make("c-6", "pod-6", "container", "sb-6", mountSpec("sb-6", "/s"))
		fake.states["c-6"] = tasktypes.Status_STOPPED
		fake.make("alone", "", "", "", `{"mounts":[{"source":"/x"}]}`) // ctr made it
		fake.make("odd", "pod-2", "container", "sb-2", "{broken")
		tracker, _ := ready(t, fake)
		wantMounting(t, tracker, "/v", "sb-2")
		wantMounting(t, tracker, "/x", "alone")
		wantMounting(t, tracker, "/s", "sb-5")
		wantMounting(t, tracker, "/nobody")
	})
}

func TestSandboxesThatAreNoContainersAreWarnedOf(t *testing.T) {
	for name, sandboxers := range map[string][]string{
		"of before an upgrade": {""}, "the usual one": {"podsandbox", "podsandbox"}, "another one": {"podsandbox", "shim"},
	} {
		t.Run(name, func(t *testing.T) {
			onContainerd(t, func(t *testing.T, fake *fakeContainerd) {
				core, logs := observer.New(zap.WarnLevel)
				fake.sandboxers, fake.log = sandboxers, zap.New(core)
				fake.put("sb-1", "pod-1")
				tracker, _ := ready(t, fake) // lists twice
				warned := logs.FilterMessageSnippet("cri.socket").FilterField(zap.String("sandboxer", "shim")).Len()
				warns := slices.Contains(sandboxers, "shim")
				if logs.Len() != warned || warns != (warned == 1) {
					t.Errorf("the log: %v", logs.All())
				}
				if listed, err := tracker.Listed(t.Context()); err != nil || !listed["sb-1"] || listed["sb-shim"] != warns || listed["sb-podsandbox"] {
					t.Errorf("listed: %v, %v", listed, err)
				}
			})
		})
	}
}
