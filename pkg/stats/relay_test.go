package stats

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
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
	hung   map[deferral.Key]bool
	err    error
}

func (s *sandboxes) Stats(ctx context.Context, v *deferral.Volume) (deferral.Report, error) {
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
		return deferral.Report{}, deferral.Errorf(deferral.Timeout, "%s hangs: %w", v.Target, ctx.Err())
	case <-wait:
	}
	return deferral.Report{Usage: []deferral.Usage{{Total: 10, Used: 4, Available: 6, Unit: deferral.UnitBytes}}}, s.err
}

func (s *sandboxes) Resize(ctx context.Context, v *deferral.Volume, r deferral.Range) (int64, error) {
	_, err := s.Stats(ctx, v)
	return r.Required, err
}

func volume(key deferral.Key) *deferral.Volume {
	return &deferral.Volume{Key: key, Target: "/t/" + string(key)}
}

func TestAskersShareOneRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{takes: 100 * time.Millisecond}
		relay := New(limits, nil)
		var askers sync.WaitGroup
		for range 50 {
			askers.Go(func() {
				answer, err := relay.Stats(t.Context(), src, volume("a"))
				if err != nil || len(answer.Usage) != 1 || answer.Took != 100*time.Millisecond {
					t.Errorf("%+v, %v", answer, err)
				}
			})
		}
		askers.Wait()
		if got := src.calls.Load(); got != 1 {
			t.Errorf("the sandbox was asked %d times", got)
		}
		if _, err := relay.Stats(t.Context(), src, volume("a")); err != nil || src.calls.Load() != 2 {
			t.Errorf("a later question was not asked anew: %v", err)
		}
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
				ctx, cancel := context.WithTimeout(t.Context(), allowed)
				defer cancel()
				_, err := relay.Stats(ctx, src, volume("a"))
				if deferral.KindOf(err) != deferral.Timeout || time.Since(start) != allowed {
					t.Errorf("after %v: %v", time.Since(start), err)
				}
			})
		}
		askers.Go(func() {
			if _, err := relay.Stats(t.Context(), src, volume("a")); err != nil || time.Since(start) != 5*time.Second {
				t.Errorf("the patient asker: %v after %v", err, time.Since(start))
			}
		})
		askers.Wait()
		if got := src.calls.Load(); got != 1 {
			t.Errorf("the sandbox was asked %d times", got)
		}
	})
}

func TestHungSandboxesLeaveOthersTheirPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{hung: map[deferral.Key]bool{"h1": true, "h2": true, "h3": true, "h4": true}}
		relay := New(limits, nil)
		var hung sync.WaitGroup
		for key := range src.hung {
			hung.Go(func() {
				if _, err := relay.Stats(t.Context(), src, volume(key)); deferral.KindOf(err) != deferral.Timeout {
					t.Errorf("hung volume: %v", err)
				}
			})
		}
		synctest.Wait()
		// All places are taken: the next waits for them to turn out slow, not
		// for the hung ones to end.
		start := time.Now()
		for _, key := range []deferral.Key{"a", "b", "c"} {
			if _, err := relay.Stats(t.Context(), src, volume(key)); err != nil {
				t.Error(err)
			}
		}
		if took := time.Since(start); took > limits.SlowAfter {
			t.Errorf("three quick volumes took %v", took)
		}
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
				if _, err := relay.Stats(t.Context(), src, volume(deferral.Key(rune('a'+i)))); err != nil {
					t.Error(err)
				}
			})
		}
		askers.Wait()
		if most := src.most.Load(); most > int32(limits.Concurrency) {
			t.Errorf("%d requests at once", most)
		}
	})
}

func TestTooManySlowSandboxes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{hung: map[deferral.Key]bool{}}
		tight := limits
		tight.MaxSlow = 1
		relay := New(tight, nil)
		var hung sync.WaitGroup
		for i := range tight.Concurrency + tight.MaxSlow {
			key := deferral.Key(rune('a' + i))
			src.hung[key] = true
		}
		for key := range src.hung {
			hung.Go(func() { _, _ = relay.Stats(t.Context(), src, volume(key)) })
		}
		time.Sleep(2 * time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := relay.Stats(ctx, src, volume("quick"))
		if kind := deferral.KindOf(err); kind != deferral.Timeout && kind != deferral.Exhausted {
			t.Errorf("got %v", err)
		}
		hung.Wait()
		synctest.Wait()
		if len(relay.places.quick) != 0 || len(relay.places.slow) != 0 {
			t.Errorf("places are still taken: %d quick, %d slow", len(relay.places.quick), len(relay.places.slow))
		}
	})
}

func TestLastKnownUsageIsKeptWithItsAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{}
		relay := New(limits, nil)
		if _, ok := relay.Known("a"); ok {
			t.Error("something is known of a volume that was never asked for")
		}
		if _, err := relay.Stats(t.Context(), src, volume("a")); err != nil {
			t.Fatal(err)
		}
		learned := time.Now()
		time.Sleep(time.Minute)
		src.err = errors.New("down")
		_, _ = relay.Stats(t.Context(), src, volume("a"))
		known, ok := relay.Known("a")
		if !ok || !known.At.Equal(learned) || len(known.Usage) != 1 || known.Err == nil || !known.ErrAt.Equal(time.Now()) {
			t.Errorf("known: %+v", known)
		}
		if known.Requests != 2 || known.Failures != 1 || !known.AskedAt.Equal(known.ErrAt) {
			t.Errorf("requests of which one failed: %+v", known)
		}
		src.err, src.takes = nil, 7*time.Millisecond
		_, _ = relay.Stats(t.Context(), src, volume("a"))
		known, _ = relay.Known("a")
		if known.Err != nil || known.Requests != 3 || known.Failures != 1 || known.Took != src.takes {
			t.Errorf("after it went right again: %+v", known)
		}
		relay.Forget("a")
		if _, ok := relay.Known("a"); ok {
			t.Error("a forgotten volume is known")
		}
	})
}

func TestForgottenVolumeDoesNotComeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{takes: time.Second}
		relay := New(limits, nil)
		go func() { _, _ = relay.Stats(context.Background(), src, volume("a")) }()
		synctest.Wait()
		relay.Forget("a")
		time.Sleep(2 * time.Second)
		if _, ok := relay.Known("a"); ok {
			t.Error("an answer of before the sandbox went was kept")
		}
	})
}

func TestExpand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{hung: map[deferral.Key]bool{"h": true}}
		var told []string
		relay := New(limits, func(v *deferral.Volume, call string, _ time.Duration, err error) {
			told = append(told, call+" "+string(v.Key)+" "+deferral.KindOf(err).String())
		})
		if size, err := relay.Expand(t.Context(), src, volume("a"), deferral.Range{Required: 7}); size != 7 || err != nil {
			t.Errorf("%d, %v", size, err)
		}
		for _, wish := range []deferral.Range{{Required: -1}, {Limit: -1}, {Required: 2, Limit: 1}} {
			if _, err := relay.Expand(t.Context(), src, volume("a"), wish); deferral.KindOf(err) != deferral.Invalid {
				t.Errorf("%+v: %v", wish, err)
			}
		}
		if _, err := relay.Expand(t.Context(), src, volume("h"), deferral.Range{}); deferral.KindOf(err) != deferral.Timeout {
			t.Errorf("hung: %v", err)
		}
		if len(told) != 2 || told[1] != "expand h timeout" {
			t.Errorf("told %q", told)
		}
	})
}

func TestWhyAVolumeDoesNotGrowIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &sandboxes{hung: map[deferral.Key]bool{"a": true}}
		relay := New(limits, nil)
		if _, err := relay.Expand(t.Context(), src, volume("a"), deferral.Range{}); err == nil {
			t.Fatal("it has grown")
		}
		src.hung = nil
		if _, err := relay.Stats(t.Context(), src, volume("a")); err != nil {
			t.Fatal(err)
		}
		known, _ := relay.Known("a")
		if deferral.KindOf(known.GrowErr) != deferral.Timeout || known.GrowErrAt.IsZero() || known.Err != nil || known.At.IsZero() {
			t.Errorf("after stats that went right: %+v", known)
		}
		if _, err := relay.Expand(t.Context(), src, volume("a"), deferral.Range{Required: 7}); err != nil {
			t.Fatal(err)
		}
		if known, _ = relay.Known("a"); known.GrowErr != nil || !known.GrowErrAt.IsZero() || known.At.IsZero() {
			t.Errorf("after it grew: %+v", known)
		}
		_, _ = relay.Expand(t.Context(), src, volume("b"), deferral.Range{})
		if _, ok := relay.Known("b"); ok {
			t.Error("a growth that went right is known")
		}
	})
}
