package sandbox

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// A runtime that sends a state that is no longer true does not bring back a
// sandbox that ended.
func TestCRIBelievesTheListingOnly(t *testing.T) {
	onCRIO(t, func(t *testing.T, fake *fakeRuntime) {
		fake.put("sb-1", "pod-1")
		tracker, told := ready(t, fake)
		fake.end("sb-1")
		check.Eventually(t, "gone", has(tracker, "pod-1"))
		before := fake.listings()
		fake.events.tell(&runtimeapi.ContainerEventResponse{ContainerId: "c-1", PodSandboxStatus: &runtimeapi.PodSandboxStatus{
			Id: "sb-1", State: runtimeapi.PodSandboxState_SANDBOX_READY, Metadata: &runtimeapi.PodSandboxMetadata{Uid: "pod-1"},
		}})
		time.Sleep(time.Second)
		if fake.listings() != before+1 || !has(tracker, "pod-1")() {
			t.Errorf("%d listings; pod-1 has %q", fake.listings()-before, tracker.OfPod("pod-1"))
		}
		fake.begin("sb-2", "pod-1")
		check.Eventually(t, "sb-2", has(tracker, "pod-1", "sb-2"))
		fake.drop("sb-2")
		fake.tell("sb-2", runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT) // without a status: nothing is left
		check.Eventually(t, "sb-2 gone", func() bool { return told.has("gone sb-2") })
	})
}

func TestCRIWithoutEventsIsAsked(t *testing.T) {
	for name, with := range map[string]func(*fakeRuntime){
		"CRI-O with events off":    func(f *fakeRuntime) { f.events.off = true },
		"no such call":             func(f *fakeRuntime) { f.events.off, f.noEvents = true, status.Error(codes.Unimplemented, "no") },
		"events for one listener":  func(f *fakeRuntime) { f.version = "1.27.9" },
		"an unknown runtime":       func(f *fakeRuntime) { f.name, f.version = "docker", "28.0" },
		"a version that is no one": func(f *fakeRuntime) { f.version = "unknown" },
	} {
		t.Run(name, func(t *testing.T) {
			onCRIO(t, func(t *testing.T, fake *fakeRuntime) {
				with(fake)
				tracker, told := ready(t, fake)
				fake.put("sb-1", "pod-1")
				time.Sleep(2 * pollTime)
				if !has(tracker, "pod-1", "sb-1")() || !tracker.Polled() {
					t.Errorf("pod-1 has %q; polled: %v", tracker.OfPod("pod-1"), tracker.Polled())
				}
				fake.unready("sb-1")
				time.Sleep(2 * pollTime)
				if !told.has("gone sb-1") || !tracker.Ready() {
					t.Errorf("told: %q", told.lines)
				}
				if _, ever := fake.events.counts(); ever > 0 != fake.events.off {
					t.Errorf("it listened to events %d times", ever)
				}
			})
		})
	}
}

// A runtime that is restarted with events turned on is listened to again, whether the
// connection broke or not: the one of the test ends its streams as a runtime does that
// stops, and goes on answering.
func TestCRIEventsThatAreTurnedOnLater(t *testing.T) {
	onCRIO(t, func(t *testing.T, fake *fakeRuntime) {
		core, logged := observer.New(zap.InfoLevel)
		fake.log, fake.events.off = zap.New(core), true
		tracker, _ := ready(t, fake)
		listens := func(want bool) {
			t.Helper()
			time.Sleep(eventsAgain + 2*pollTime)
			if open, _ := fake.events.counts(); tracker.Polled() == want || (open == 1) != want {
				t.Errorf("polled: %v; %d streams", tracker.Polled(), open)
			}
		}
		listens(false)
		listens(false)
		if _, ever := fake.events.counts(); ever < 3 {
			t.Errorf("it was asked for events %d times", ever)
		}
		if n := logged.FilterMessageSnippet("sends no events").Len(); n != 1 {
			t.Errorf("that it sends no events was logged %d times", n)
		}
		for _, on := range []bool{true, false, true} {
			fake.events.setOn(on)
			listens(on)
		}
	})
}

// While there are no volumes a runtime without events is left in peace, and as
// soon as there is one it is asked again.
func TestCRIWithoutEventsIsAskedRarelyWhenIdle(t *testing.T) {
	onCRIO(t, func(t *testing.T, fake *fakeRuntime) {
		fake.events.off = true
		fake.start()
		var busy atomic.Bool
		tracker, _ := track(t, fake, Config{Busy: busy.Load})
		settle()
		before := fake.listings()
		fake.put("sb-1", "pod-1")
		time.Sleep(idleTime / 2)
		if n := fake.listings(); n != before {
			t.Errorf("%d listings for nobody", n-before)
		}
		busy.Store(true)
		time.Sleep(2 * pollTime)
		if !has(tracker, "pod-1", "sb-1")() {
			t.Error("sb-1 is not known")
		}
	})
}

// A restart between two listings of a runtime without events is noticed: gRPC would
// connect again by itself, and the first answer afterwards may be empty.
func TestCRIRestartBetweenListingsIsNoticed(t *testing.T) {
	onCRIO(t, func(t *testing.T, fake *fakeRuntime) {
		fake.events.off = true
		fake.put("sb-1", "pod-1")
		tracker, told := ready(t, fake)
		fake.stop()
		fake.forgetful = 1
		fake.start()
		before := fake.listings()
		time.Sleep(5 * pollTime)
		if fake.listings() < before+2 || !tracker.Ready() || told.has("gone sb-1") {
			t.Errorf("%d listings; told: %q", fake.listings()-before, told.lines)
		}
	})
}

// Containerd reports a sandbox as not ready also when it does not know its state. It has ended only if its
// process has; until then it is asked again, and delays no other sandbox.
func TestNotReadyMayLive(t *testing.T) {
	for process, lives := range map[string]bool{
		"running": true, "paused": true, "unknown": true, "shimless": true, "hangs": true,
		"stopped": false, "deleted": false, "none": false,
	} {
		t.Run(process, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fake := newFakeRuntime("containerd", "v2.4.1")
				fake.put("sb-0", "pod-1")
				fake.put("sb-1", "pod-1")
				fake.unready("sb-1")
				fake.processes["sb-1"] = process
				tracker, told := ready(t, fake)
				_, known := tracker.PodOf("sb-1")
				if listed, err := tracker.Listed(t.Context()); err != nil || known != lives || listed["sb-1"] != lives {
					t.Errorf("known: %v; listed: %v, %v", known, listed, err)
				}
				begin := time.Now()
				fake.end("sb-0")
				check.Eventually(t, "the other one's end", func() bool { return told.has("gone sb-0") })
				if took := time.Since(begin); took > time.Second {
					t.Errorf("it is known after %v", took)
				}
				fake.mu.Lock()
				delete(fake.processes, "sb-1")
				fake.mu.Unlock()
				time.Sleep(2 * pollTime)
				asked := fake.statuses()
				time.Sleep(2 * pollTime)
				if !has(tracker, "pod-1")() || fake.statuses() != asked {
					t.Errorf("pod-1 has %q; asked %d times more", tracker.OfPod("pod-1"), fake.statuses()-asked)
				}
			})
		})
	}
}
