package sandbox

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// quickPace is the usual one, made for tests.
func quickPace() pace {
	const unit = 10 * time.Millisecond
	return pace{poll: 8 * unit, idle: 100 * unit, gap: unit, settle: 4 * unit, relist: time.Minute, again: time.Minute}
}

func startCRI(t *testing.T, fake *fakeRuntime, busy func() bool) (*Tracker, *journal) {
	t.Helper()
	told := &journal{}
	tracker := NewCRI(Config{
		Socket:  fake.socket,
		OnAdded: func(pod, id string) { told.add("added " + pod + " " + id) },
		OnGone:  func(id string) { told.add("gone " + id) },
		Busy:    busy,
	}, zap.NewNop())
	tracker.pace = quickPace()
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

func has(tracker *Tracker, pod string, ids ...string) func() bool {
	return func() bool { return slices.Equal(tracker.OfPod(pod), ids) }
}

func TestCRIListsAndFollowsEvents(t *testing.T) {
	fake := newFakeRuntime(t)
	fake.start()
	fake.put("sb-1", "pod-1", "crust")
	fake.put("dead", "pod-1", "crust")
	fake.end("dead")
	fake.put("plain", "pod-2", "")                                   // CRI-O lists no handlers
	tracker, told := startCRI(t, fake, func() bool { return false }) // events need no asking
	check.Eventually(t, "ready", tracker.Ready)
	if !has(tracker, "pod-1", "sb-1")() {
		t.Errorf("pod-1 has %q", tracker.OfPod("pod-1"))
	}
	if pod, known := tracker.PodOf("sb-1"); !known || pod != "pod-1" {
		t.Errorf("sb-1 is of %q, %v", pod, known)
	}
	check.Eventually(t, "a stream", func() bool { return fake.everStreamed() == 1 })
	time.Sleep(2 * quickPace().settle) // what is told from now on is told by events only

	fake.put("sb-2", "pod-1", "crust")
	fake.tell("sb-2", runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT)
	check.Eventually(t, "sb-2, the newest first", has(tracker, "pod-1", "sb-2", "sb-1"))
	fake.end("sb-1")
	fake.tell("sb-1", runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
	check.Eventually(t, "sb-1 gone", has(tracker, "pod-1", "sb-2"))
	check.Eventually(t, "told", func() bool { return told.has("added pod-1 sb-2") && told.has("gone sb-1") })

	fake.mu.Lock()
	delete(fake.sandboxes, "sb-2")
	fake.mu.Unlock()
	fake.tell("sb-2", runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT) // without a status: nothing is left
	check.Eventually(t, "sb-2 gone", has(tracker, "pod-1"))
	check.Eventually(t, "told of sb-2", func() bool { return told.has("gone sb-2") })
}

// A runtime that sends a state that is no longer true does not bring back a
// sandbox that ended.
func TestCRIBelievesTheListingOnly(t *testing.T) {
	fake := newFakeRuntime(t)
	fake.start()
	fake.put("sb-1", "pod-1", "crust")
	tracker, _ := startCRI(t, fake, nil)
	check.Eventually(t, "a stream", func() bool { return tracker.Ready() && fake.everStreamed() == 1 })
	time.Sleep(2 * quickPace().settle)
	ready := &runtimeapi.ContainerEventResponse{ContainerId: "c-1", PodSandboxStatus: &runtimeapi.PodSandboxStatus{
		Id: "sb-1", State: runtimeapi.PodSandboxState_SANDBOX_READY, Metadata: &runtimeapi.PodSandboxMetadata{Uid: "pod-1"},
	}}
	fake.end("sb-1")
	fake.tell("sb-1", runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
	check.Eventually(t, "gone", has(tracker, "pod-1"))
	before := fake.listings()
	fake.tellOf(ready)
	check.Eventually(t, "asked again", func() bool { return fake.listings() > before })
	time.Sleep(20 * time.Millisecond)
	if !has(tracker, "pod-1")() {
		t.Error("a dead sandbox is back")
	}
}

func TestCRIWithoutEventsIsAsked(t *testing.T) {
	cases := map[string]func(*fakeRuntime){
		"CRI-O with events off":    func(f *fakeRuntime) { f.endsAtOnce = true },
		"no such call":             func(f *fakeRuntime) { f.endsAtOnce, f.noEvents = true, status.Error(codes.Unimplemented, "no") },
		"events for one listener":  func(f *fakeRuntime) { f.version = "1.27.9" },
		"an unknown runtime":       func(f *fakeRuntime) { f.name, f.version = "docker", "28.0" },
		"a version that is no one": func(f *fakeRuntime) { f.version = "unknown" },
	}
	for name, with := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fake := newFakeRuntime(t)
			with(fake)
			fake.start()
			tracker, told := startCRI(t, fake, nil)
			check.Eventually(t, "ready", tracker.Ready)
			time.Sleep(2 * quickPace().settle)
			fake.put("sb-1", "pod-1", "crust")
			start := time.Now()
			check.Eventually(t, "sb-1", has(tracker, "pod-1", "sb-1"))
			fake.end("sb-1")
			check.Eventually(t, "gone", func() bool { return told.has("gone sb-1") })
			if took := time.Since(start); took > 100*quickPace().poll {
				t.Errorf("it took %v", took)
			}
			if listens := fake.everStreamed() > 0; listens != fake.endsAtOnce {
				t.Errorf("it listened to events: %v", listens)
			}
			if !tracker.Ready() {
				t.Error("it is not followed")
			}
		})
	}
}

// A runtime that is restarted with events turned on is listened to again, whether the
// connection broke or not: the one of the test ends its streams as a runtime does that
// stops, and goes on answering.
func TestCRIEventsThatAreTurnedOnLater(t *testing.T) {
	fake := newFakeRuntime(t)
	fake.setEvents(false)
	fake.start()
	core, logged := observer.New(zap.InfoLevel)
	tracker := NewCRI(Config{Socket: fake.socket}, zap.New(core))
	tracker.pace = quickPace()
	tracker.pace.again = 4 * tracker.pace.poll
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- tracker.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		fake.stop()
	}()
	check.Eventually(t, "it is asked every few seconds", tracker.Polled)
	before := fake.everStreamed()
	check.Eventually(t, "it was asked for events in vain", func() bool { return fake.everStreamed() >= before+3 })
	if n := logged.FilterMessageSnippet("sends no events").Len(); n != 1 {
		t.Errorf("that it sends no events was logged %d times", n)
	}
	fake.setEvents(true)
	check.Eventually(t, "it is listened to", func() bool { return fake.listeners() == 1 && !tracker.Polled() })
	fake.setEvents(false)
	check.Eventually(t, "it is asked again", tracker.Polled)
	fake.setEvents(true)
	check.Eventually(t, "it is listened to again", func() bool { return fake.listeners() == 1 && !tracker.Polled() })
}

// While there are no volumes a runtime without events is left in peace, and as
// soon as there is one it is asked again.
func TestCRIWithoutEventsIsAskedRarelyWhenIdle(t *testing.T) {
	fake := newFakeRuntime(t)
	fake.endsAtOnce = true
	fake.start()
	var busy atomic.Bool
	tracker, _ := startCRI(t, fake, busy.Load)
	check.Eventually(t, "listed and listed again", func() bool { return fake.listings() == 2 })
	fake.put("sb-1", "pod-1", "crust")
	time.Sleep(3 * quickPace().poll)
	if n := fake.listings(); n != 2 {
		t.Errorf("%d listings for nobody", n)
	}
	busy.Store(true)
	check.Eventually(t, "sb-1", has(tracker, "pod-1", "sb-1"))
}

func TestCRIFindsWhatWasMissedWhileBlind(t *testing.T) {
	fake := newFakeRuntime(t)
	fake.start()
	fake.put("old", "pod-1", "crust")
	fake.put("stays", "pod-2", "crust")
	tracker, told := startCRI(t, fake, nil)
	check.Eventually(t, "old", has(tracker, "pod-1", "old"))
	check.Eventually(t, "a stream", func() bool { return fake.everStreamed() == 1 })
	fake.stop()
	check.Eventually(t, "not ready", func() bool { return !tracker.Ready() && tracker.LastError() != nil })
	if !has(tracker, "pod-1", "old")() {
		t.Error("what was known is forgotten with the runtime's restart")
	}
	fake.end("old")
	fake.put("new", "pod-1", "crust")
	fake.start()
	check.Eventually(t, "new", has(tracker, "pod-1", "new"))
	check.Eventually(t, "told", func() bool { return told.has("gone old") && told.has("added pod-1 new") })
	check.Eventually(t, "a new stream", func() bool { return fake.everStreamed() == 2 })
	if told.has("gone stays") {
		t.Error("a sandbox that lived on was told to be gone")
	}
}

// A restart between two listings of a runtime without events is noticed: gRPC would
// connect again by itself, and the first answer afterwards may be empty.
func TestCRIRestartBetweenListingsIsNoticed(t *testing.T) {
	fake := newFakeRuntime(t)
	fake.endsAtOnce = true
	fake.start()
	fake.put("sb-1", "pod-1", "crust")
	tracker, told := startCRI(t, fake, nil)
	check.Eventually(t, "it is polled", func() bool { return tracker.Polled() && has(tracker, "pod-1", "sb-1")() })
	for range 3 {
		before := fake.listings()
		check.Eventually(t, "a listing", func() bool { return fake.listings() > before })
		fake.stop()
		fake.mu.Lock()
		fake.forgetful = 1
		fake.mu.Unlock()
		fake.start()
		before = fake.listings()
		check.Eventually(t, "listed again", func() bool { return fake.listings() > before+1 && tracker.Ready() })
		if told.has("gone sb-1") {
			t.Fatal("an empty first answer after a restart was believed")
		}
	}
}

func TestCRIThatComesLater(t *testing.T) {
	fake := newFakeRuntime(t)
	tracker, _ := startCRI(t, fake, nil)
	check.Eventually(t, "a cause", func() bool { return strings.Contains(tracker.LastError().Error(), fake.socket) })
	_, err := tracker.Destinations(t.Context(), "sb-1", "/v")
	if volume.KindOf(err) != volume.NoSandbox || !strings.Contains(err.Error(), fake.socket) || !strings.Contains(err.Error(), "sb-1") {
		t.Errorf("got %v", err)
	}
	fake.put("sb-1", "pod-1", "crust")
	fake.start()
	check.Eventually(t, "sb-1", has(tracker, "pod-1", "sb-1"))
}

func TestCRIDestinations(t *testing.T) {
	fake := newFakeRuntime(t)
	fake.start()
	// Kubelet's directory is a symbolic link.
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	source := filepath.Join(dir, "real/pods/pod-1/volumes/v/mount")
	if err := os.MkdirAll(source, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("real", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	mount := func(host, container string) *runtimeapi.Mount {
		return &runtimeapi.Mount{HostPath: host, ContainerPath: container}
	}
	fake.put("sb-1", "pod-1", "crust")
	fake.contain("c-1", "sb-1", mount(source, "/data"), mount("/other", "/other"))
	fake.contain("c-2", "sb-1", mount(filepath.Join(dir, "link/pods/pod-1/volumes/v/mount"), "/linked"), mount(source, "/data"))
	fake.contain("c-3", "sb-1", mount(filepath.Join(dir, "missing/pods/pod-1/volumes/v/mount"), "/missing"))
	fake.contain("c-4", "sb-9", mount(source, "/of-another-sandbox"))
	fake.contain("../c-5", "sb-1", mount(source, "/odd"))
	fake.contain("c-6", "sb-1", mount(source, "/vanished"))
	fake.vanished["c-6"] = true
	tracker, _ := startCRI(t, fake, nil)
	check.Eventually(t, "ready", tracker.Ready)
	got, err := tracker.Destinations(t.Context(), "sb-1", source)
	slices.Sort(got)
	if err != nil || !slices.Equal(got, []string{"/data", "/linked"}) {
		t.Errorf("%q, %v", got, err)
	}
	ids, err := tracker.ContainerIDs(t.Context(), "sb-1")
	slices.Sort(ids)
	if err != nil || !slices.Equal(ids, []string{"c-1", "c-2", "c-3", "c-6", "sb-1"}) {
		t.Errorf("%q, %v", ids, err)
	}
	if _, err := tracker.ContainerIDs(t.Context(), "unknown"); volume.KindOf(err) != volume.NoSandbox {
		t.Errorf("an unknown sandbox: %v", err)
	}
}

func TestCRIIgnoresHostileSandboxes(t *testing.T) {
	fake := newFakeRuntime(t)
	fake.start()
	fake.put("../../etc", "pod-1", "crust")
	fake.put("sb-odd", "pod/../1", "crust")
	fake.put("sb-empty", "", "crust")
	fake.put(strings.Repeat("x", 200), "pod-1", "crust")
	fake.put("sb-1", "pod-1", "../crust\n")
	tracker, _ := startCRI(t, fake, nil)
	check.Eventually(t, "ready", tracker.Ready)
	if got := slices.Collect(maps.Keys(tracker.known)); !slices.Equal(got, []string{"sb-1"}) {
		t.Errorf("known are %q", got)
	}
}

// Look-ups are from memory: a runtime that hangs delays only who asks it.
func TestHungCRIBlocksNoLookUp(t *testing.T) {
	fake := newFakeRuntime(t)
	fake.start()
	fake.put("sb-1", "pod-1", "crust")
	tracker, _ := startCRI(t, fake, nil)
	check.Eventually(t, "a stream", func() bool { return tracker.Ready() && fake.everStreamed() == 1 })
	release := fake.block()
	defer release()
	fake.tell("sb-1", runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT) // a listing begins, and hangs
	time.Sleep(2 * quickPace().gap)
	start := time.Now()
	_, known := tracker.PodOf("sb-1")
	if took := time.Since(start); !known || len(tracker.OfPod("pod-1")) != 1 || took > criListTime/2 {
		t.Errorf("look-ups: %v, after %v", known, took)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := tracker.Destinations(ctx, "sb-1", "/v"); volume.KindOf(err) != volume.Timeout {
		t.Errorf("got %v", err)
	}
	gone, cancelGone := context.WithCancel(t.Context())
	cancelGone()
	if _, err := tracker.ContainerIDs(gone, "sb-1"); volume.KindOf(err) != volume.Canceled {
		t.Errorf("a caller who went away: %v", err)
	}
}

// A storm of events is answered by a few listings, and ends in the truth.
func TestStormOfCRIEvents(t *testing.T) {
	fake := newFakeRuntime(t)
	fake.start()
	tracker, _ := startCRI(t, fake, nil)
	check.Eventually(t, "a stream", func() bool { return tracker.Ready() && fake.everStreamed() == 1 })
	const storm = 1000
	start := time.Now()
	for i := range storm {
		id := fmt.Sprintf("sb-%d", i)
		fake.put(id, "pod-1", "crust")
		fake.tell(id, runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT)
		fake.end(id)
		fake.tell(id, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
	}
	fake.put("last", "pod-1", "crust")
	fake.tell("last", runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT)
	check.Eventually(t, "only the last", has(tracker, "pod-1", "last"))
	if n, most := fake.listings(), 3+int(time.Since(start)/quickPace().gap); n > most {
		t.Errorf("%d listings in %v", n, time.Since(start))
	}
}

// TestOldContainerdIsRefused until it is upgraded. Who asks which sandboxes have a volume is told what to do.
func TestOldContainerdIsRefused(t *testing.T) {
	byAPI, byCRI := newFake(t), newFakeRuntime(t)
	byCRI.name = "containerd"
	run := func(version string) {
		byAPI.mu.Lock()
		defer byAPI.mu.Unlock()
		byCRI.mu.Lock()
		defer byCRI.mu.Unlock()
		byAPI.version, byCRI.version = version, version
		byAPI.start()
		byCRI.start()
	}
	run("v1.7.35")
	ofAPI, _ := startTracker(t, byAPI)
	ofCRI, _ := startCRI(t, byCRI, nil)
	for _, tracker := range []*Tracker{ofAPI, ofCRI} {
		const want = "containerd 1.7.35 is not supported: upgrade to 2.0 or newer"
		check.Eventually(t, "refused", func() bool { return tracker.LastError().Error() == want })
		if _, err := tracker.Mounting(t.Context(), "/v"); volume.KindOf(err) != volume.NoSandbox || !strings.Contains(err.Error(), want) {
			t.Error(err)
		}
	}
	byAPI.stop()
	byCRI.stop()
	run("v2.0.0-rc.1")
	check.Eventually(t, "followed", func() bool { return ofAPI.Ready() && ofCRI.Ready() })
	for version, refused := range map[string]bool{"1.6.20~ds1": true, "2.4.1+unknown": false, "10.0.0": false, "devel": false} {
		if err := checkSupported(version); (err != nil) != refused {
			t.Errorf("%q: %v", version, err)
		}
	}
}
