// Package pace keeps loops over all volumes of a node from delaying calls.
package pace

import (
	"os"
	"runtime"
	"sync/atomic"
	"time"
)

const (
	// stepsPerLook bounds how often the clock is read.
	stepsPerLook = 16
	// turn is how long a loop may keep the processor.
	turn = time.Millisecond
	// rest is how long it sleeps then. runtime.Gosched is not enough: the scheduler polls
	// sockets only when it has nothing else to run.
	rest = 50 * time.Microsecond
	// linger is how long the additional processors stay after the last turn of a loop: the
	// answer has still to be encoded, and the next page may be requested.
	linger = 100 * time.Millisecond
	// busy is how many processors there are while a loop needs them: one for the loop,
	// one for gRPC's writer of its answer, and one for calls.
	busy = 3
)

// processors is how many processors Go's scheduler has.
var processors struct {
	state atomic.Int32
	// busyUntil is when the additional ones are no longer needed, in Unix nanoseconds.
	busyUntil atomic.Int64
}

const (
	fixed  int32 = iota // LimitProcs was not called
	narrow              // one
	wide                // busy, until busyUntil
)

// LimitProcs limits Go's scheduler to one processor, and to a few while a loop needs them.
// It is called after the start, which uses all. A call is a chain of goroutines that wait
// for each other and for other processes: on one processor the next one is ready at once, on
// several another core has to be woken, which costs a gRPC hop a fifth of its time. A
// goroutine that blocks in the kernel delays no other: the scheduler takes its processor
// away. GOMAXPROCS in the environment overrides all this.
func LimitProcs() {
	if os.Getenv("GOMAXPROCS") == "" && processors.state.CompareAndSwap(fixed, narrow) {
		runtime.GOMAXPROCS(1)
	}
}

// widen adds the additional processors, or extends their time. The kernel schedules a waiting
// thread at once, even on one core; Go's scheduler takes 10 ms to preempt a goroutine.
func widen(now time.Time) {
	processors.busyUntil.Store(now.Add(linger).UnixNano())
	if processors.state.CompareAndSwap(narrow, wide) {
		// In the background: the runtime makes it wait for a garbage collection to end.
		go whileWide()
	}
}

func whileWide() {
	runtime.GOMAXPROCS(busy)
	for {
		left := time.Until(time.Unix(0, processors.busyUntil.Load()))
		if left <= 0 {
			break
		}
		time.Sleep(left)
	}
	runtime.GOMAXPROCS(1)
	processors.state.Store(narrow)
}

// turns counts the turns of all loops.
var turns atomic.Int64

// Loop paces a loop. The daemon runs on one processor once it is up, so that a loop
// over 10,000 volumes would delay each stage by tens of milliseconds. The zero value
// is ready for use by one goroutine.
type Loop struct {
	steps int
	began time.Time
	turns int64 // the turns of all loops at the end of the last turn of this one
}

// Step is called for each element. It usually returns at once. At the end of a turn it
// requests additional processors and, if there are none yet or another loop uses one, sleeps
// for a moment. No lock may be held.
func (l *Loop) Step() {
	if !l.over() {
		return
	}
	if all := turns.Add(1); runtime.GOMAXPROCS(0) == 1 || all-l.turns > 1 {
		time.Sleep(rest)
	}
	l.turns, l.began = turns.Load(), time.Now()
}

// over reports whether a turn is over.
func (l *Loop) over() bool {
	if l.steps++; l.steps%stepsPerLook != 1 {
		return false
	}
	now := time.Now()
	if l.began.IsZero() {
		l.began = now
	}
	if now.Sub(l.began) < turn {
		return false
	}
	widen(now)
	return true
}
