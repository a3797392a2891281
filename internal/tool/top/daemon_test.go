package top

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// events collects what a feed tells.
type events struct {
	mu  sync.Mutex
	all []Event
}

func (e *events) tell(event Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, event)
}

func (e *events) count(is func(Event) bool) (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, event := range e.all {
		if is(event) {
			n++
		}
	}
	return n
}

func isSynced(event Event) bool {
	w, ok := event.(Watched)
	return ok && slices.ContainsFunc(w.Changes, func(c *adminv1.WatchVolumesResponse) bool {
		return c.GetType() == adminv1.WatchVolumesResponse_TYPE_SYNCED
	})
}

func isAway(event Event) bool { _, ok := event.(Disconnected); return ok }

func TestTheWatchSurvivesTheDaemon(t *testing.T) {
	f := newFake(t, many(3))
	ctx, cancel := context.WithCancel(t.Context())
	var got events
	var group sync.WaitGroup
	group.Go(func() { f.daemon().watch(ctx, Settings{Driver: "disk", Handler: "kata"}, got.tell) })
	check.Eventually(t, "synced", func() bool { return got.count(isSynced) == 1 })
	check.That(t, f.watched.GetDriver() == "disk" && f.watched.GetHandler() == "kata", "asked for %v", f.watched)

	f.mu.Lock()
	close(f.end) // it stops in order
	f.end = make(chan struct{})
	f.mu.Unlock()
	check.Eventually(t, "watched again", func() bool { return got.count(isSynced) == 2 })

	f.stop() // it dies, and is away for a while
	check.Eventually(t, "tried in vain", func() bool { return got.count(isAway) >= 3 })
	f.start()
	check.Eventually(t, "watched after it died", func() bool { return got.count(isSynced) == 3 })
	cancel()
	group.Wait()
	var pauses []time.Duration
	for _, event := range got.all {
		if away, ok := event.(Disconnected); ok {
			pauses = append(pauses, away.Retry.Sub(away.At))
			check.That(t, away.Reason == "explained: Unavailable", "the reason is %q", away.Reason)
		}
	}
	for _, pause := range pauses {
		check.That(t, pause >= firstRetry/2-time.Millisecond && pause <= lastRetry*3/2, "paused %v", pauses)
	}
}

func TestManyChangesAreFewEvents(t *testing.T) {
	f := newFake(t, many(500))
	start := time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	var got events
	var group sync.WaitGroup
	group.Go(func() { f.daemon().watch(ctx, Settings{}, got.tell) })
	check.Eventually(t, "synced", func() bool { return got.count(isSynced) == 1 })
	for _, v := range many(500) {
		f.put(v)
	}
	changes := func() (n int) {
		got.count(func(event Event) bool {
			if w, ok := event.(Watched); ok {
				n += len(w.Changes)
			}
			return false
		})
		return n
	}
	check.Eventually(t, "all changes", func() bool { return changes() == 1001 })
	took := time.Since(start)
	cancel()
	group.Wait()
	n, most := len(got.all), 10+int(took/gatherFor)
	check.That(t, n <= most, "1001 changes in %v are %d events, want at most %d", took, n, most)
}

func TestOnce(t *testing.T) {
	all := many(30)
	for _, v := range all {
		v.Usage, v.UsageAt = nil, nil
	}
	f := newFake(t, append(all, volumes()...))
	f.takes, f.pages = 3*time.Millisecond, 10
	picture := check.Value(Once(t.Context(), f.daemon(), Settings{Interval: 10 * time.Second, Sort: ByName, Filter: "kata", ASCII: true}))(t)
	check.That(t, len(picture.Volumes) == 35 && len(picture.Handlers) == 2 && picture.Node.GetVersion() == "v1.2.3", "%d volumes", len(picture.Volumes))
	check.That(t, f.most <= maxConcurrent && len(f.asked) == 33, "%d were asked, %d at once", len(f.asked), f.most)
	text := picture.Text(0)
	check.Equal(t, strings.Count(text, "75%"), 32, "fresh numbers in\n%s", text)
	check.Says(t, "the picture", text, "crust-proxy v1.2.3  node-7", "Handlers 1/2", "! handler crust:", `the guest said \x1b[2J`, "ERROR")
	check.That(t, !strings.ContainsAny(text, "\x1b\a\u202e"), "%q", text)
	narrow := picture.Text(80)
	for line := range strings.Lines(narrow) {
		got := cells(strings.TrimSuffix(line, "\n"))
		check.That(t, got <= 80, "%d cells: %s", got, line)
	}
	flat := strings.Join(strings.Fields(narrow), " ")
	check.That(t, strings.Contains(flat, `"only-databases" says no`) && strings.Contains(flat, `the guest said \x1b[2J`),
		"not all errors are in\n%s", narrow)
}

// Who does not answer in time is shown with what is known.
func TestOnceDoesNotWaitForHungSandboxes(t *testing.T) {
	f := newFake(t, many(3))
	f.takes = time.Hour
	picture, err := Once(t.Context(), f.daemon(), Settings{Interval: 100 * time.Millisecond})
	check.That(t, err == nil && len(picture.Volumes) == 3 && picture.Volumes[0].GetUsageAt() != nil, "%v, %v", picture, err)
	f.stop()
	check.Fails(t, check.Err(Once(t.Context(), f.daemon(), Settings{Interval: time.Second}))) // or it looked at a daemon that is not there
	f.start()
}

func TestOnceOfNothing(t *testing.T) {
	picture, err := Once(t.Context(), newFake(t, nil).daemon(), Settings{Interval: time.Second})
	check.That(t, err == nil && strings.Contains(picture.Text(0), "No volumes."), "%v, %v", picture.Text(0), err)
}
