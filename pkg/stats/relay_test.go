package stats

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

var limits = Limits{
	StatsTimeout: 10 * time.Second, ExpandTimeout: 20 * time.Second,
	Concurrency: 4, SlowAfter: time.Second, MaxSlow: 8,
}

// sandboxes answers at once, or hangs for the volumes in hung.
type sandboxes struct {
	calls  atomic.Int32
	flying atomic.Int32
	most   atomic.Int32
	takes  time.Duration
	hung   map[volume.Key]bool
	err    error
	id     string
}

func (s *sandboxes) Stats(ctx context.Context, v *volume.Volume) (volume.Report, error) {
	s.calls.Add(1)
	if now := s.flying.Add(1); now > s.most.Load() {
		s.most.Store(now)
	}
	defer s.flying.Add(-1)
	wait := time.After(s.takes)
	if s.hung[v.Key] {
		wait = nil
	}
	select {
	case <-ctx.Done():
		return volume.Report{}, volume.Errorf(volume.Timeout, "%s hangs: %w", v.Target, ctx.Err())
	case <-wait:
	}
	return volume.Report{Usage: []volume.Usage{{Total: 10, Used: 4, Available: 6, Unit: volume.UnitBytes}}, Sandbox: s.id}, s.err
}

func (s *sandboxes) Resize(ctx context.Context, v *volume.Volume, r volume.Range) (int64, error) {
	_, err := s.Stats(ctx, v)
	return r.Required, err
}

func testVolume(key volume.Key) *volume.Volume {
	return &volume.Volume{Key: key, Target: "/t/" + string(key)}
}

func TestAskersShareOneRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{takes: 100 * time.Millisecond}
		relay := New(limits, nil)
		var askers sync.WaitGroup
		for range 50 {
			askers.Go(func() {
				answer, err := relay.Stats(t.Context(), src, testVolume("a"))
				check.That(t, err == nil && len(answer.Usage) == 1 && answer.Took == 100*time.Millisecond, "%+v, %v", answer, err)
			})
		}
		askers.Wait()
		check.Equal(t, src.calls.Load(), 1, "requests to the sandbox")
		_, err := relay.Stats(t.Context(), src, testVolume("a"))
		check.That(t, err == nil && src.calls.Load() == 2, "a later question was not asked anew: %v", err)
	})
}

func TestEachAskerHasItsOwnDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{takes: 5 * time.Second}
		relay := New(limits, nil)
		start := time.Now()
		var askers sync.WaitGroup
		for _, allowed := range []time.Duration{time.Second, 2 * time.Second} {
			askers.Go(func() {
				_, err := relay.Stats(check.Within(t, allowed), src, testVolume("a"))
				check.That(t, volume.KindOf(err) == volume.Timeout && time.Since(start) == allowed, "after %v: %v", time.Since(start), err)
			})
		}
		askers.Go(func() {
			_, err := relay.Stats(t.Context(), src, testVolume("a"))
			check.That(t, err == nil && time.Since(start) == 5*time.Second, "the patient asker: %v after %v", err, time.Since(start))
		})
		askers.Wait()
		check.Equal(t, src.calls.Load(), 1, "requests to the sandbox")
	})
}

func TestHungSandboxesLeaveOthersTheirPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{hung: map[volume.Key]bool{"h1": true, "h2": true, "h3": true, "h4": true}}
		relay := New(limits, nil)
		var hung sync.WaitGroup
		for key := range src.hung {
			hung.Go(func() {
				_, err := relay.Stats(t.Context(), src, testVolume(key))
				check.That(t, volume.KindOf(err) == volume.Timeout, "hung volume: %v", err)
			})
		}
		synctest.Wait()
		// All slots are taken: the next waits for them to turn out slow, not for the hung ones to end.
		start := time.Now()
		for _, key := range []volume.Key{"a", "b", "c"} {
			check.Value(relay.Stats(t.Context(), src, testVolume(key)))(t)
		}
		took := time.Since(start)
		check.That(t, took <= limits.SlowAfter, "three quick volumes took %v", took)
		hung.Wait()
	})
}

func TestConcurrencyIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{takes: 10 * time.Millisecond}
		relay := New(limits, nil)
		var askers sync.WaitGroup
		for i := range 100 {
			askers.Go(func() {
				_, err := relay.Stats(t.Context(), src, testVolume(volume.Key(rune('a'+i))))
				check.That(t, err == nil, "%v", err)
			})
		}
		askers.Wait()
		most := src.most.Load()
		check.That(t, most <= int32(limits.Concurrency), "%d requests at once", most)
	})
}

func TestTooManySlowSandboxes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{hung: map[volume.Key]bool{}}
		tight := limits
		tight.MaxSlow = 1
		relay := New(tight, nil)
		var hung sync.WaitGroup
		for i := range tight.Concurrency + tight.MaxSlow {
			key := volume.Key(rune('a' + i))
			src.hung[key] = true
		}
		for key := range src.hung {
			hung.Go(func() { _, _ = relay.Stats(t.Context(), src, testVolume(key)) })
		}
		time.Sleep(2 * time.Second)
		relay.SetLimits(tight) // other keys of the configuration were changed
		_, err := relay.Stats(check.Within(t, time.Second), src, testVolume("quick"))
		kind := volume.KindOf(err)
		check.That(t, kind == volume.Timeout || kind == volume.Exhausted, "got %v", err)
		hung.Wait()
		synctest.Wait()
		check.That(t, len(relay.slots.Load().quick) == 0 && len(relay.slots.Load().slow) == 0,
			"slots are still taken: %d quick, %d slow", len(relay.slots.Load().quick), len(relay.slots.Load().slow))
	})
}

func TestLastKnownUsageIsKeptWithItsAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{}
		relay := New(limits, nil)
		_, ok := relay.Known("a")
		check.That(t, !ok, "something is known of a volume that was never asked for")
		check.Value(relay.Stats(t.Context(), src, testVolume("a")))(t)
		learned := time.Now()
		time.Sleep(time.Minute)
		src.err = errors.New("down")
		_, _ = relay.Stats(t.Context(), src, testVolume("a"))
		known, ok := relay.Known("a")
		check.That(t, ok && known.At.Equal(learned) && len(known.Usage) == 1 && known.Err != nil && known.ErrAt.Equal(time.Now()), "known: %+v", known)
		check.That(t, known.Requests == 2 && known.Failures == 1 && known.AskedAt.Equal(known.ErrAt), "requests of which one failed: %+v", known)
		src.err, src.takes = nil, 7*time.Millisecond
		_, _ = relay.Stats(t.Context(), src, testVolume("a"))
		known, _ = relay.Known("a")
		check.That(t, known.Err == nil && known.Requests == 3 && known.Failures == 1 && known.Took == src.takes,
			"after it went right again: %+v", known)
		relay.Forget("a")
		_, ok = relay.Known("a")
		check.That(t, !ok, "a forgotten volume is known")
	})
}

func TestForgottenVolumeDoesNotComeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{takes: time.Second}
		relay := New(limits, nil)
		go func() { _, _ = relay.Stats(context.Background(), src, testVolume("a")) }()
		synctest.Wait()
		relay.Forget("a")
		time.Sleep(2 * time.Second)
		_, ok := relay.Known("a")
		check.That(t, !ok, "an answer of before the sandbox went was kept")
	})
}

// A growth that ends after its volume has gone, and after one of its successor's has begun.
func TestGrowthOfAForgottenVolumeDoesNotComeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{takes: time.Second, err: errors.New("down")}
		relay := New(limits, nil)
		expand := func() { _, _ = relay.Expand(context.Background(), src, testVolume("a"), volume.Range{}) }
		go expand()
		synctest.Wait()
		relay.Forget("a")
		time.Sleep(time.Second / 2)
		go expand()
		time.Sleep(3 * time.Second / 4) // the first has ended
		known, ok := relay.Known("a")
		check.That(t, !ok, "of a volume that was forgotten, %v is known", known.GrowErr)
		time.Sleep(time.Second)
		known, _ = relay.Known("a")
		check.That(t, known.GrowErr != nil && len(relay.growing) == 0, "of its successor %v is known, and %d growths are", known.GrowErr, len(relay.growing))
	})
}

// The request that finds a new sandbox is one of those that are remembered.
func TestTheAnswerThatFindsTheSandboxIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for by, want := range map[string]bool{"new": true, "old": false, "": false} {
			src := &sandboxes{takes: time.Second, id: "new"}
			relay := New(limits, nil)
			var asker sync.WaitGroup
			asker.Go(func() { _, _ = relay.Stats(context.Background(), src, testVolume("a")) })
			synctest.Wait()
			relay.Rebound("a", by)
			check.Value(relay.Stats(t.Context(), src, testVolume("b")))(t)
			asker.Wait()
			_, ok := relay.Known("a")
			check.That(t, ok == want, "the sandbox is now %q, and what %q said is remembered: %v", by, src.id, ok)
		}
	})
}

// stuck hangs in a system call until it is closed, whatever the context says.
type stuck chan struct{}

func (s stuck) Stats(context.Context, *volume.Volume) (volume.Report, error) {
	<-s
	return volume.Report{}, nil
}

func (s stuck) Resize(context.Context, *volume.Volume, volume.Range) (int64, error) {
	<-s
	return 0, nil
}

// A request that hangs in the kernel ends for its caller, and is the only one of its volume.
func TestRequestThatHangsIsLeftBehind(t *testing.T) {
	for call, ask := range map[string]func(context.Context, *Relay, Source) error{
		"stats": func(ctx context.Context, r *Relay, src Source) error {
			_, err := r.Stats(ctx, src, testVolume("h"))
			return err
		},
		"growth": func(ctx context.Context, r *Relay, src Source) error {
			_, err := r.Expand(ctx, src, testVolume("h"), volume.Range{})
			return err
		},
	} {
		t.Run(call, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				hung, src, relay := make(stuck), &sandboxes{}, New(Limits{StatsTimeout: time.Second, ExpandTimeout: time.Minute, Concurrency: 1, MaxSlow: 1, SlowAfter: time.Second}, nil)
				begin := time.Now()
				err := ask(check.Within(t, 3*time.Second), relay, hung)
				check.That(t, volume.KindOf(err) == volume.Timeout && time.Since(begin) <= 3*time.Second+leaveTime, "after %v: %v", time.Since(begin), err)
				for _, change := range []func(){func() {}, func() { relay.Rebound("h", "new") }, func() { relay.Forget("h") }} {
					change()
					begin = time.Now()
					err := ask(t.Context(), relay, src)
					check.That(t, errors.Is(err, sys.ErrHangs) && time.Since(begin) == 0 && src.calls.Load() == 0, "asked again: %v", err)
				}
				_, err = relay.Stats(t.Context(), src, testVolume("a"))
				check.That(t, err == nil && time.Since(begin) == 0, "another volume: %v", err)
				close(hung)
				synctest.Wait()
				err = ask(t.Context(), relay, src)
				check.That(t, err == nil && len(relay.hung) == 0, "after it returned: %v", err)
				check.That(t, len(relay.slots.Load().quick)+len(relay.slots.Load().slow) == 0, "a slot is still taken")
			})
		})
	}
}

// What was asked of the old sandbox is not shared by who asks after it went.
func TestAFlightToTheOldSandboxIsNotJoined(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{takes: time.Second, id: "new"}
		relay := New(limits, nil)
		var askers sync.WaitGroup
		for range 2 {
			askers.Go(func() { _, _ = relay.Stats(context.Background(), src, testVolume("a")) })
			synctest.Wait()
			relay.Rebound("a", "new")
		}
		askers.Wait()
		check.Equal(t, src.calls.Load(), 2, "requests")
		relay.Forget("a")
	})
}

func TestExpand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{hung: map[volume.Key]bool{"h": true}}
		var told []string
		relay := New(limits, func(v *volume.Volume, call string, _ time.Duration, err error) {
			told = append(told, call+" "+string(v.Key)+" "+volume.KindOf(err).String())
		})
		size, err := relay.Expand(t.Context(), src, testVolume("a"), volume.Range{Required: 7})
		check.That(t, size == 7 && err == nil, "%d, %v", size, err)
		for _, wish := range []volume.Range{{Required: -1}, {Limit: -1}, {Required: 2, Limit: 1}} {
			_, err := relay.Expand(t.Context(), src, testVolume("a"), wish)
			check.That(t, volume.KindOf(err) == volume.Invalid, "%+v: %v", wish, err)
		}
		check.Kind(t, check.Err(relay.Expand(t.Context(), src, testVolume("h"), volume.Range{})), volume.Timeout) // hung
		check.That(t, len(told) == 2 && told[1] == "expand h timeout", "told %q", told)
	})
}

func TestWhyAVolumeDoesNotGrowIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{hung: map[volume.Key]bool{"a": true}}
		relay := New(limits, nil)
		check.Fails(t, check.Err(relay.Expand(t.Context(), src, testVolume("a"), volume.Range{}))) // or it has grown
		src.hung = nil
		check.Value(relay.Stats(t.Context(), src, testVolume("a")))(t)
		for _, silent := range []error{
			volume.Errorf(volume.OutOfRange, "20Ti do not fit"), volume.Errorf(volume.Invalid, "no size"), volume.Errorf(volume.NoSandbox, "none"),
			volume.Errorf(volume.Unsupported, "%w", volume.ErrNeverGrows),
		} {
			src.err = silent
			_, err := relay.Expand(t.Context(), src, testVolume("a"), volume.Range{})
			check.That(t, volume.KindOf(err) == volume.KindOf(silent), "it says nothing of the volume: %v", err)
		}
		src.err = nil
		known, _ := relay.Known("a")
		check.That(t, volume.KindOf(known.GrowErr) == volume.Timeout && !known.GrowErrAt.IsZero() && known.Err == nil && !known.At.IsZero(),
			"after stats that went right: %+v", known)
		check.Value(relay.Expand(t.Context(), src, testVolume("a"), volume.Range{Required: 7}))(t)
		known, _ = relay.Known("a")
		check.That(t, known.GrowErr == nil && known.GrowErrAt.IsZero() && !known.At.IsZero(), "after it grew: %+v", known)
		_, _ = relay.Expand(t.Context(), src, testVolume("b"), volume.Range{})
		_, ok := relay.Known("b")
		check.That(t, !ok, "a growth that went right is known")
	})
}

// A volume whose sandbox has answered and went is told from one that never had any.
func TestLostSandboxIsNoted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{id: "old"}
		relay := New(limits, nil)
		had := func(want bool) {
			t.Helper()
			known, _ := relay.Known("a")
			check.That(t, known.HadSandbox() == want, "had a sandbox: %v, of %+v", !want, known)
		}
		relay.Rebound("a", "")
		had(false)
		check.Value(relay.Stats(t.Context(), src, testVolume("a")))(t)
		had(true)
		for range 2 {
			relay.Rebound("a", "")
			had(true)
		}
		known, _ := relay.Known("a")
		check.That(t, known.At.IsZero() && !known.LostAt.IsZero(), "what the lost sandbox said is kept: %+v", known)
		relay.Rebound("a", "new")
		had(false)
		relay.Forget("a")
	})
}
