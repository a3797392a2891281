package pace

import (
	"runtime"
	"testing"
	"time"
)

// TestALoopGetsFurtherProcessors: a loop that is longer than a turn has processors
// added for what waits beside it, and they are taken away again.
func TestALoopGetsFurtherProcessors(t *testing.T) {
	t.Setenv("GOMAXPROCS", "")
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	defer processors.state.Store(fixed)
	LimitProcs()
	if n := runtime.GOMAXPROCS(0); n != 1 {
		t.Fatalf("%d processors after LimitProcs", n)
	}
	var loop Loop
	await(t, busy, loop.Step)
	await(t, 1, func() { time.Sleep(time.Millisecond) })
}

func await(t *testing.T, processors int, f func()) {
	t.Helper()
	for start := time.Now(); runtime.GOMAXPROCS(0) != processors; f() {
		if time.Since(start) > time.Minute {
			t.Fatalf("there are not %d processors after a minute", processors)
		}
	}
}

// TestLimitProcsLeavesTheEnvironmentTheLastWord: with GOMAXPROCS set, loops change nothing.
func TestLimitProcsLeavesTheEnvironmentTheLastWord(t *testing.T) {
	t.Setenv("GOMAXPROCS", "3")
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(3))
	LimitProcs()
	widen(time.Now())
	if n := runtime.GOMAXPROCS(0); n != 3 || processors.state.Load() != fixed {
		t.Errorf("%d processors", n)
	}
}
