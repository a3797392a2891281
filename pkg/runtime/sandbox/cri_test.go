package sandbox

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// While there are no volumes the runtime is left in peace, and as soon as there is one it is asked again.
func TestTheRuntimeIsAskedRarelyWhenIdle(t *testing.T) {
	onCRIO(t, func(t *testing.T, fake *fakeRuntime) {
		fake.start()
		var busy atomic.Bool
		tracker, _ := track(t, fake, Config{Busy: busy.Load})
		settle()
		before := fake.lists.Load()
		fake.put("sb-1", "pod-1")
		time.Sleep(idleTime / 2)
		check.Equal(t, fake.lists.Load(), before, "listings")
		busy.Store(true)
		time.Sleep(2 * pollTime)
		check.That(t, has(tracker, "pod-1", "sb-1")(), "sb-1 is not known")
	})
}

// A restart between two listings is noticed: gRPC would
// connect again by itself, and the first answer afterwards may be empty.
func TestCRIRestartBetweenListingsIsNoticed(t *testing.T) {
	onCRIO(t, func(t *testing.T, fake *fakeRuntime) {
		fake.put("sb-1", "pod-1")
		tracker, told := ready(t, fake)
		fake.stop()
		fake.forgetful = 1
		fake.start()
		before := fake.lists.Load()
		time.Sleep(5 * pollTime)
		check.That(t, fake.lists.Load() >= before+2 && tracker.Ready() && !told.has("gone sb-1"),
			"%d listings; told: %q", fake.lists.Load()-before, told.lines)
	})
}

// TestShimsThatHangAreAskedLast: however many hang, the end of another sandbox is known in time, and so is theirs.
func TestShimsThatHangAreAskedLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const many = 400
		fake := newFakeRuntime("containerd", "v2.4.1")
		for i := range many + 1 {
			id := fmt.Sprintf("sb-%d", i)
			fake.put(id, "pod-"+id)
			if i < many {
				fake.end(id)
				fake.processes[id] = "hangs"
			}
		}
		tracker, told := ready(t, fake)
		time.Sleep(4 * listTime)
		fake.end(fmt.Sprintf("sb-%d", many))
		for range 2 { // a release has less time
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			listed, err := tracker.Listed(ctx)
			cancel()
			check.That(t, err == nil && !listed[fmt.Sprintf("sb-%d", many)] && len(listed) == many, "%d listed, %v", len(listed), err)
		}
		for id, want := range map[string]time.Duration{fmt.Sprintf("sb-%d", many): 0, "sb-0": endTime} { // one that others do not delay
			begin := time.Now()
			listed, err := tracker.Listed(t.Context(), id)
			took := time.Since(begin)
			check.That(t, err == nil && listed[id] == (want > 0) && took == want, "%s is listed: %v, %v, after %v", id, listed[id], err, took)
		}
		check.Eventually(t, "its end", func() bool { return told.has(fmt.Sprintf("gone sb-%d", many)) })
		for _, i := range []int{0, many - 1} {
			fake.mu.Lock()
			delete(fake.processes, fmt.Sprintf("sb-%d", i))
			fake.mu.Unlock()
			begin := time.Now()
			check.Eventually(t, "the end of one that hung", func() bool { return told.has(fmt.Sprintf("gone sb-%d", i)) })
			check.That(t, time.Since(begin) <= 4*listTime, "after %v", time.Since(begin))
		}
	})
}

// Containerd reports a sandbox as not ready also when it does not know its state. It has ended only if its
// process has; until then it is asked again, and delays no other sandbox.
func TestNotReadyMayLive(t *testing.T) {
	for process, lives := range map[string]bool{
		"running": true, "paused": true, "unknown": true, "shimless": true, "hangs": true, "unasked": true,
		"stopped": false, "deleted": false, "none": false,
	} {
		t.Run(process, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fake := newFakeRuntime("containerd", "v2.4.1")
				fake.put("sb-0", "pod-1")
				fake.put("sb-1", "pod-1")
				fake.end("sb-1")
				fake.processes["sb-1"] = process
				tracker, told := ready(t, fake)
				_, known := tracker.PodOf("sb-1")
				listed, err := tracker.Listed(t.Context())
				check.That(t, err == nil && known == lives && listed["sb-1"] == (lives || process == "none"),
					"known: %v; listed: %v, %v", known, listed, err)
				begin := time.Now()
				fake.end("sb-0")
				check.Eventually(t, "the other one's end", func() bool { return told.has("gone sb-0") })
				took := time.Since(begin)
				check.That(t, took <= pollTime+2*endTime, "it is known after %v", took)
				fake.mu.Lock()
				delete(fake.processes, "sb-1")
				fake.mu.Unlock()
				time.Sleep(2 * pollTime)
				asked := fake.asked.Load()
				time.Sleep(2 * pollTime)
				check.That(t, has(tracker, "pod-1")() && fake.asked.Load() == asked,
					"pod-1 has %q; asked %d times more", tracker.OfPod("pod-1"), fake.asked.Load()-asked)
			})
		})
	}
}
