package deferral

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// TestWorkOnAllVolumesLetsOthersRun: on one processor, as the daemon runs, a goroutine
// that yields while all volumes are worked on gets its turn again within milliseconds.
// Measured is processor time, so that a busy machine does not count.
func TestWorkOnAllVolumesLetsOthersRun(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	all := newTable(NoObserver{})
	for n := range 2000 {
		all.volumes[volume.Key(rune(n))] = &entry{}
	}
	// The collector of garbage can have its turn in one try, not in all.
	longest := time.Hour
	for try := 0; try < 10 && longest > 8*time.Millisecond; try++ {
		longest = min(longest, longestWait(t, all))
	}
	if longest > 8*time.Millisecond {
		t.Errorf("a turn took %s to come", longest)
	}
}

// longestWait is the longest time for which a goroutine that yielded had no turn.
func longestWait(t *testing.T, all *table) (longest time.Duration) {
	t.Helper()
	ended := make(chan error, 1)
	go func() {
		ended <- all.each(t.Context(), func(context.Context, *entry) {
			for start := cpuTime(); cpuTime()-start < 50*time.Microsecond; {
			}
		})
	}()
	for last := cpuTime(); ; {
		runtime.Gosched()
		now := cpuTime()
		longest, last = max(longest, now-last), now
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
			return longest
		default:
		}
	}
}

func cpuTime() time.Duration {
	var at unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &at); err != nil {
		panic(err)
	}
	return time.Duration(at.Nano())
}

// TestOneSlowVolumeKeepsNobodyWaiting: on one processor, too.
func TestOneSlowVolumeKeepsNobodyWaiting(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	all := newTable(NoObserver{})
	for n := range 100 {
		all.volumes[volume.Key(rune(n))] = &entry{rec: &record{}}
	}
	var rest sync.WaitGroup
	rest.Add(99)
	var hung atomic.Bool
	err := all.each(t.Context(), func(context.Context, *entry) {
		if hung.CompareAndSwap(false, true) {
			rest.Wait() // hangs until all others are done
			return
		}
		rest.Done()
	})
	if err != nil {
		t.Error(err)
	}
}
