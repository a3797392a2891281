package deferral

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestOneSlowVolumeKeepsNobodyWaiting: on one processor, too.
func TestOneSlowVolumeKeepsNobodyWaiting(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	all := newTable(NoObserver{})
	for n := range 100 {
		all.volumes[volume.Key(rune(n))] = &entry{rec: &record{Volume: volume.Volume{Key: volume.Key(rune(n))}}}
	}
	var rest sync.WaitGroup
	rest.Add(99)
	var hung atomic.Bool
	check.Must(t, all.each(t.Context(), all.all(), func(context.Context, *entry) {
		if hung.CompareAndSwap(false, true) {
			rest.Wait() // hangs until all others are done
			return
		}
		rest.Done()
	}))
}

// TestMostVolumesThatHang: beyond a bound no volume is begun with, and each is tried again when the others answer.
func TestMostVolumesThatHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := newTable(NoObserver{})
		for n := range 2 * maxLeft {
			key := volume.Key(rune(n))
			all.volumes[key] = &entry{rec: &record{Volume: volume.Volume{Key: key}}}
		}
		var begun atomic.Int32
		answer := make(chan struct{})
		for range 2 {
			check.Must(t, all.each(t.Context(), all.all(), func(context.Context, *entry) {
				begun.Add(1)
				<-answer
			}))
			hang := len(all.left())
			shown := all.where(func(e *entry) bool { return all.status(e, nil).Problem != nil })
			check.That(t, hang >= maxLeft && hang <= maxLeft+mostWorkers && int(begun.Load()) == hang && len(shown) == 2*maxLeft,
				"%d hang of %d, and %d are shown", hang, begun.Load(), len(shown))
		}
		close(answer)
		synctest.Wait()
		begun.Store(0)
		check.Must(t, all.each(t.Context(), all.all(), func(_ context.Context, e *entry) {
			begun.Add(1)
			all.setProblem(e.rec.Key, nil)
		}))
		shown := all.where(func(e *entry) bool { return all.status(e, nil).Problem != nil })
		check.That(t, begun.Load() == 2*maxLeft && len(shown) == 0, "%d of all were tried again, %d have a problem", begun.Load(), len(shown))
	})
}

// TestVolumeThatHangsIsLeftBehind: at the start and in reconcile, by everybody who wants something of it, until it
// answers. Then it goes on from what is true by then.
func TestVolumeThatHangsIsLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := publishedBench(t, plain)
		s.start(s.b.cfg)
		unlock := check.Value(s.b.locks.lock(t.Context(), s.key))(t) // the claim at the start hangs here
		check.Must(t, s.b.Load(t.Context()))
		s.is("volumes")
		next := s.asked()
		next.Target = s.b.cfg.Root + "/next"
		for range 2 {
			report := check.Value(s.b.Reconcile(t.Context()))(t)
			check.That(t, len(report.Repairs) == 1, "reported: %v", report)
			s.wants(report.Repairs[0].Err, volume.Busy, "has not answered")
			status, _ := s.b.Get(s.key)
			s.wants(status.Problem, volume.Busy, "has not answered")
			s.wants(check.Err(s.b.Release(t.Context(), s.asked().Target)), volume.Busy, "has not answered")
			s.wants(check.Err(s.b.ReleaseKey(t.Context(), s.key, true)), volume.Busy, "has not answered")
			s.wants(check.Err(s.b.Defer(t.Context(), s.asked())), volume.Busy, "has not answered")
			s.wants(check.Err(s.b.Defer(t.Context(), next)), volume.InUse, s.asked().Target)
		}
		s.said = nil
		unlock()
		synctest.Wait()
		s.is("claimed volumes")
		status, _ := s.b.Get(s.key)
		check.That(t, status.Problem == nil || status.Leaving, "its problem: %v", status.Problem)
		check.Value(s.b.Reconcile(t.Context()))(t)
		s.saw("guard claimed volumes", "publish claimed volumes")
		check.Value(s.b.Release(t.Context(), s.asked().Target))(t)
		check.Must(t, check.Err(s.b.Defer(t.Context(), next)))
	})
}

// TestLateRepairsAreReported with the next run, and change no report that was given.
func TestLateRepairsAreReported(t *testing.T) {
	var late collector
	found := collector{late: &late}
	found.add(nil, "in time", nil)
	report := found.take(true)
	found.add(nil, "too late", nil)
	next := late.take(false)
	check.That(t, len(report.Repairs) == 1 && len(next.Repairs) == 1 && next.Repairs[0].Action == "too late", "reported %v, and then %v", report, next)
}

// TestOrder: whatever is added, changed and removed, lists and pages are ordered by target.
func TestOrder(t *testing.T) {
	made := newTable(NoObserver{})
	random := rand.New(rand.NewPCG(1, 2))
	want := make(map[string]*record)
	for range 2000 {
		n := random.IntN(60)
		rec := &record{Volume: volume.Volume{Key: volume.Key(fmt.Sprint(n)), Target: fmt.Sprintf("/%d", n/2)}}
		switch random.IntN(4) {
		case 0:
			made.remove(rec.Key)
			delete(want, string(rec.Key))
		case 1:
			made.markRemoving(rec.Key, nil)
		default:
			rec.Target += strings.Repeat("x", random.IntN(2)) // a key of another target does not occur, but would be found
			made.add(rec)
			want[string(rec.Key)] = rec
		}
		order := slices.SortedFunc(maps.Values(want), func(x, y *record) int {
			return cmp.Or(cmp.Compare(x.Target, y.Target), cmp.Compare(x.Key, y.Key))
		})
		var got []*record
		target, key := "", volume.Key("")
		for len(got) <= len(order) {
			page := made.after(target, key, 1+n%7)
			if len(page) == 0 {
				break
			}
			for _, one := range page {
				got = append(got, one.rec)
			}
			target, key = got[len(got)-1].Target, got[len(got)-1].Key
		}
		check.Require(t, slices.Equal(got, order) && len(made.all()) == len(order),
			"%d listed by pages, %d in all, want %d", len(got), len(made.all()), len(order))
	}
}

// TestReleasedMeanwhileIsNotMoved: a release that ends between the two looks of another one leaves no volume elsewhere.
func TestReleasedMeanwhileIsNotMoved(t *testing.T) {
	made, rec := newTable(NoObserver{}), testRecord("/mount")
	made.add(rec)
	made.all()
	check.That(t, movedFrom(made, "/mount", "other") != nil, "one that has moved is not found")
	delete(made.volumes, rec.Key) // it is in the list that the first look read
	check.That(t, movedFrom(made, "/mount", rec.Key) == nil, "it counts as moved")
}
