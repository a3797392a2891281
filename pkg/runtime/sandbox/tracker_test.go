package sandbox

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	eventtypes "github.com/containerd/containerd/api/events"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// journal is what the tracker told.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) add(line string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, line)
}

func (j *journal) has(line string) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Contains(j.lines, line)
}

func startTracker(t *testing.T, fake *fakeContainerd) (*Tracker, *journal) {
	t.Helper()
	told := &journal{}
	tracker := New(Config{
		Socket: fake.socket, Namespace: "k8s.io",
		OnAdded: func(pod, id string) { told.add("added " + pod + " " + id) },
		OnGone:  func(id string) { told.add("gone " + id) },
	}, zap.NewNop())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- tracker.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if fake.server != nil {
			fake.stop()
		}
	})
	return tracker, told
}

func TestListsAndFollows(t *testing.T) {
	fake := newFake(t)
	fake.start()
	fake.put("sb-1", "pod-1", kindSandbox, "", "{}")
	fake.put("c-1", "pod-1", "container", "sb-1", "{}")
	fake.put("dead", "pod-2", kindSandbox, "", "{}")
	fake.states["dead"] = tasktypes.Status_STOPPED
	fake.put("taskless", "pod-2", kindSandbox, "", "{}")
	fake.taskless["taskless"] = true
	fake.put("hung", "pod-3", kindSandbox, "", "{}")
	fake.states["hung"] = tasktypes.Status_UNKNOWN
	fake.put("paused", "pod-4", kindSandbox, "", "{}")
	fake.states["paused"] = tasktypes.Status_PAUSED
	tracker, told := startTracker(t, fake)
	check.Eventually(t, "ready", func() bool { return tracker.Ready() && fake.subscribed() })
	if got := tracker.OfPod("pod-1"); !slices.Equal(got, []string{"sb-1"}) {
		t.Errorf("pod-1 has %q", got)
	}
	if got := tracker.OfPod("pod-2"); len(got) != 0 {
		t.Errorf("a sandbox whose task has stopped lives: %q", got)
	}
	if len(tracker.OfPod("pod-3")) != 1 || len(tracker.OfPod("pod-4")) != 1 {
		t.Error("a sandbox that hangs or is paused is taken for gone")
	}
	if pod, known := tracker.PodOf("sb-1"); !known || pod != "pod-1" {
		t.Errorf("sb-1 is of %q", pod)
	}
	if _, known := tracker.PodOf("c-1"); known {
		t.Error("a container is taken for a sandbox")
	}

	// The sandbox dies and the pod gets a new one.
	fake.tell("/tasks/exit", &eventtypes.TaskExit{ContainerID: "sb-1", ID: "exec-7"})
	fake.run("sb-2", "pod-1")
	check.Eventually(t, "sb-2", func() bool { return slices.Equal(tracker.OfPod("pod-1"), []string{"sb-2", "sb-1"}) })
	fake.tell("/tasks/exit", &eventtypes.TaskExit{ContainerID: "sb-1", ID: "sb-1"})
	check.Eventually(t, "sb-1 gone", func() bool { return slices.Equal(tracker.OfPod("pod-1"), []string{"sb-2"}) })
	check.Eventually(t, "told", func() bool { return told.has("added pod-1 sb-2") && told.has("gone sb-1") })
	fake.tell("/containers/delete", &eventtypes.ContainerDelete{ID: "sb-2"})
	check.Eventually(t, "sb-2 gone", func() bool { return len(tracker.OfPod("pod-1")) == 0 })
}

// A shim that cannot be reached is not a sandbox that went, and hides no other one.
func TestUnreachableShimHidesNobody(t *testing.T) {
	fake := newFake(t)
	fake.start()
	fake.put("sb-1", "pod-1", kindSandbox, "", "{}")
	fake.put("away", "pod-2", kindSandbox, "", "{}")
	fake.shimless["away"] = true
	tracker, _ := startTracker(t, fake)
	check.Eventually(t, "ready", tracker.Ready)
	if len(tracker.OfPod("pod-1")) != 1 || len(tracker.OfPod("pod-2")) != 1 {
		t.Errorf("known are %q and %q", tracker.OfPod("pod-1"), tracker.OfPod("pod-2"))
	}
}

func TestWhatWasMissedWhileBlindIsFound(t *testing.T) {
	fake := newFake(t)
	fake.start()
	fake.put("old", "pod-1", kindSandbox, "", "{}")
	tracker, told := startTracker(t, fake)
	check.Eventually(t, "old", func() bool { return len(tracker.OfPod("pod-1")) == 1 })
	fake.stop()
	check.Eventually(t, "not ready", func() bool { return !tracker.Ready() && tracker.LastError() != nil })
	if got := tracker.OfPod("pod-1"); !slices.Equal(got, []string{"old"}) {
		t.Errorf("what was known is forgotten with containerd's restart: %q", got)
	}
	fake.drop("old")
	fake.put("new", "pod-1", kindSandbox, "", "{}")
	fake.start()
	check.Eventually(t, "new", func() bool { return slices.Equal(tracker.OfPod("pod-1"), []string{"new"}) })
	check.Eventually(t, "told", func() bool { return told.has("gone old") && told.has("added pod-1 new") })
}

func TestContainerdThatComesLater(t *testing.T) {
	fake := newFake(t)
	tracker, _ := startTracker(t, fake)
	check.Eventually(t, "a cause", func() bool {
		err := tracker.LastError()
		return err != nil && strings.Contains(err.Error(), "containerd")
	})
	_, err := tracker.Destinations(t.Context(), "sb-1", "/v")
	if volume.KindOf(err) != volume.NoSandbox || !strings.Contains(err.Error(), fake.socket) || !strings.Contains(err.Error(), "sb-1") {
		t.Errorf("got %v", err)
	}
	fake.put("sb-1", "pod-1", kindSandbox, "", "{}")
	fake.start()
	check.Eventually(t, "sb-1", func() bool { return len(tracker.OfPod("pod-1")) == 1 })
}

func TestDestinations(t *testing.T) {
	fake := newFake(t)
	fake.start()
	spec := func(sandbox string, mounts ...string) string {
		var parts []string
		for _, m := range mounts {
			source, destination, _ := strings.Cut(m, ":")
			parts = append(parts, fmt.Sprintf(`{"source":%q,"destination":%q}`, source, destination))
		}
		return fmt.Sprintf(`{"annotations":{%q:%q},"mounts":[%s]}`, sandboxAnnotation, sandbox, strings.Join(parts, ","))
	}
	fake.put("sb-1", "pod-1", kindSandbox, "", spec("sb-1", "/v:/sandbox"))
	fake.put("c-1", "pod-1", "container", "sb-1", spec("sb-1", "/v:/data", "/w:/other"))
	fake.put("c-2", "pod-1", "container", "", spec("sb-1", "/v:/data", "/v:/copy")) // made before an upgrade
	fake.put("c-3", "pod-1", "container", "", spec("another", "/v:/not-mine"))
	fake.put("c-4", "pod-1", "container", "sb-1", "{broken")
	tracker, _ := startTracker(t, fake)
	check.Eventually(t, "ready", tracker.Ready)
	got, err := tracker.Destinations(t.Context(), "sb-1", "/v")
	slices.Sort(got)
	if err != nil || !slices.Equal(got, []string{"/copy", "/data"}) {
		t.Errorf("%q, %v", got, err)
	}
	ids, err := tracker.ContainerIDs(t.Context(), "sb-1")
	slices.Sort(ids)
	if err != nil || !slices.Equal(ids, []string{"c-1", "c-2", "sb-1"}) {
		t.Errorf("%q, %v", ids, err)
	}
	if _, err := tracker.Destinations(t.Context(), "unknown", "/v"); volume.KindOf(err) != volume.NoSandbox {
		t.Errorf("an unknown sandbox: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := tracker.Destinations(ctx, "sb-1", "/v"); volume.KindOf(err) != volume.Canceled {
		t.Errorf("a caller who went away: %v", err)
	}
}

func TestHostileEventsAreIgnored(t *testing.T) {
	fake := newFake(t)
	fake.start()
	tracker, _ := startTracker(t, fake)
	check.Eventually(t, "ready", func() bool { return tracker.Ready() && fake.subscribed() })
	fake.run("../../etc", "pod-1")
	fake.run("sb-odd", "pod/../1")
	fake.tellRaw("k8s.io", "/tasks/start", []byte{0xff, 0xff})
	fake.tellRaw("k8s.io", strings.Repeat("x", 4096), nil)
	fake.put("sb-moby", "pod-1", kindSandbox, "", "{}")
	fake.tell("/tasks/start", &eventtypes.TaskStart{ContainerID: "not-there"})
	fake.drop("sb-moby")
	fake.run("sb-1", "pod-1")
	check.Eventually(t, "sb-1", func() bool { return slices.Equal(tracker.OfPod("pod-1"), []string{"sb-1"}) })
	for _, id := range []string{"../../etc", "sb-odd", "sb-moby"} {
		if _, known := tracker.PodOf(id); known {
			t.Errorf("%q was taken", id)
		}
	}
}

// A question that hangs delays no other sandbox, and its own sandbox is not
// taken for live once it has gone.
func TestAHangingQuestionDelaysNobody(t *testing.T) {
	fake := newFake(t)
	fake.start()
	fake.put("sb-1", "pod-1", kindSandbox, "", "{}")
	tracker, told := startTracker(t, fake)
	check.Eventually(t, "ready", func() bool { return tracker.Ready() && fake.subscribed() })
	fake.mu.Lock()
	fake.hanging["stuck"] = true
	fake.mu.Unlock()
	fake.run("stuck", "pod-1")
	begin := time.Now()
	fake.tell("/tasks/exit", &eventtypes.TaskExit{ContainerID: "sb-1", ID: "sb-1"})
	fake.run("sb-2", "pod-2")
	check.Eventually(t, "the others", func() bool { return told.has("gone sb-1") && told.has("added pod-2 sb-2") })
	if took := time.Since(begin); took > lookTime/2 {
		t.Errorf("they waited for the one that hangs: %v", took)
	}
	fake.drop("stuck")
	fake.tell("/containers/delete", &eventtypes.ContainerDelete{ID: "stuck"})
	fake.run("sb-3", "pod-3")
	check.Eventually(t, "sb-3", func() bool { return told.has("added pod-3 sb-3") })
	if _, known := tracker.PodOf("stuck"); known {
		t.Error("a sandbox that went while it was asked about is live")
	}
	if !tracker.Ready() {
		t.Errorf("one question that hangs cut the connection: %v", tracker.LastError())
	}
}

// Events are gone by one at a time: they cause no listing.
func TestAStormOfEventsCausesNoListing(t *testing.T) {
	fake := newFake(t)
	fake.start()
	tracker, told := startTracker(t, fake)
	check.Eventually(t, "ready", func() bool { return tracker.Ready() && fake.subscribed() })
	const storm = 2000
	for i := range storm {
		id := fmt.Sprintf("sb-%d", i)
		fake.run(id, "pod-1")
		fake.tell("/tasks/exit", &eventtypes.TaskExit{ContainerID: id, ID: id})
	}
	fake.run("last", "pod-1")
	check.Eventually(t, "last", func() bool { return told.has("added pod-1 last") })
	if got := tracker.OfPod("pod-1"); !slices.Equal(got, []string{"last"}) {
		t.Errorf("%d sandboxes stayed", len(got))
	}
	if n := fake.listings(); n > 2 {
		t.Errorf("%d listings", n)
	}
}

// Other namespaces of containerd, such as Docker's, are no business of ours.
func TestOtherNamespacesAreIgnored(t *testing.T) {
	fake := newFake(t)
	fake.start()
	fake.put("sb-1", "pod-1", kindSandbox, "", "{}")
	tracker, told := startTracker(t, fake)
	check.Eventually(t, "ready", func() bool { return tracker.Ready() && fake.subscribed() })
	raw, err := proto.Marshal(&eventtypes.TaskExit{ContainerID: "sb-1", ID: "sb-1"})
	if err != nil {
		t.Fatal(err)
	}
	fake.tellRaw("moby", "/tasks/exit", raw)
	fake.run("sb-2", "pod-2")
	check.Eventually(t, "sb-2", func() bool { return told.has("added pod-2 sb-2") })
	if _, known := tracker.PodOf("sb-1"); !known {
		t.Error("an event of another namespace ended a sandbox of ours")
	}
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
	if err := f.endListing(live, nil); err != nil {
		t.Fatal(err)
	}
	got := tracker.OfPod("pod-1")
	slices.Sort(got)
	if !slices.Equal(got, []string{"new", "stays"}) {
		t.Errorf("got %q", got)
	}
}

func TestHungContainerdAnswersItsCallerInTime(t *testing.T) {
	fake := newFake(t)
	fake.start()
	fake.put("sb-1", "pod-1", kindSandbox, "", "{}")
	tracker, _ := startTracker(t, fake)
	check.Eventually(t, "ready", tracker.Ready)
	fake.mu.Lock() // nothing answers now
	defer fake.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := tracker.ContainerIDs(ctx, "sb-1"); volume.KindOf(err) != volume.Timeout {
		t.Errorf("got %v", err)
	}
}

func TestErrorsOfCallsAreInPlainWords(t *testing.T) {
	answer := status.Error(codes.Unavailable, "no such socket")
	for _, c := range []struct {
		err  error
		want string
	}{
		{answer, "no such socket"},
		{fmt.Errorf("containerd: events: %w", answer), "containerd: events: no such socket"},
		{io.EOF, "EOF"},
	} {
		if got := plain(c.err); got.Error() != c.want {
			t.Errorf("%v is told as %q", c.err, got)
		}
	}
}
