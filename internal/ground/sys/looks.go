package sys

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"time"
)

const (
	lookTime = time.Second
	maxHung  = 64
)

// ErrHangs is returned when see takes too long, for example on a file whose server does not answer.
var ErrHangs = errors.New("it hangs, as on a filesystem with a server that does not answer")

// ErrManyHang is the ErrHangs of a call that was not made, because too many others hang.
var ErrManyHang = fmt.Errorf("too many others hang: %w", ErrHangs)

// Looks bounds system calls on files and devices of others, which may hang in the kernel: one call at a
// time per key, and no caller waits long. The zero value is ready to use.
type Looks[K comparable] struct {
	// Time bounds how long a caller waits for its turn, and then for its call; 0 is lookTime.
	Time time.Duration
	// Most bounds the calls that take longer, each of which occupies a thread; 0 is maxHung.
	Most int
	// Changed, which may be nil, is called for a key that hangs, and when it does no longer.
	Changed func(K)

	mu   sync.Mutex
	last map[K]*Running[K]
	hung int
}

// Running is a call for a key.
type Running[K comparable] struct {
	of    *Looks[K]
	key   K
	done  chan struct{}
	since time.Time
	hung  bool
}

// Look runs see. After ErrHangs see is still running, so it must not change data of the caller.
func Look[K comparable, V any](l *Looks[K], key K, see func() (V, error)) (seen V, err error) {
	mine, err := l.Begin(key)
	if err != nil {
		return seen, err
	}
	late := time.NewTimer(cmp.Or(l.Time, lookTime)) // also if its turn came late
	defer late.Stop()
	out := make(chan func() (V, error), 1)
	go func() {
		seen, err := see()
		mine.End() // before the answer: the call has ended once out has it
		out <- func() (V, error) { return seen, err }
	}()
	select {
	case answer := <-out:
		return answer()
	case <-late.C:
	}
	if !mine.Leave() { // it has just ended
		return (<-out)()
	}
	return seen, ErrHangs
}

// Leave says that the call hangs, and is false if it has ended.
func (r *Running[K]) Leave() bool {
	r.of.mu.Lock()
	runs := r.of.last[r.key] == r
	if runs {
		r.hung = true
		r.of.hung++
	}
	r.of.mu.Unlock()
	if runs {
		r.of.changed(r.key)
	}
	return runs
}

// End ends the call, and reports whether it was left behind.
func (r *Running[K]) End() (left bool) {
	r.of.mu.Lock()
	delete(r.of.last, r.key)
	if r.hung {
		r.of.hung--
	}
	r.of.mu.Unlock()
	close(r.done)
	if r.hung {
		r.of.changed(r.key)
	}
	return r.hung
}

// Hangs reports since when the call for a key hangs.
func (l *Looks[K]) Hangs(key K) (since time.Time, hangs bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if last := l.last[key]; last != nil && last.hung {
		return last.since, true
	}
	return time.Time{}, false
}

func (l *Looks[K]) changed(key K) {
	if l.Changed != nil {
		l.Changed(key)
	}
}

// Begin begins a call that its caller makes and ends himself, when no other call for the key is running.
func (l *Looks[K]) Begin(key K) (*Running[K], error) {
	for late := time.Now().Add(cmp.Or(l.Time, lookTime)); ; {
		l.mu.Lock()
		before := l.last[key]
		if before != nil && before.hung {
			l.mu.Unlock()
			return nil, ErrHangs
		}
		if l.hung >= cmp.Or(l.Most, maxHung) {
			l.mu.Unlock()
			return nil, ErrManyHang
		}
		if before == nil {
			if l.last == nil {
				l.last = make(map[K]*Running[K])
			}
			mine := &Running[K]{of: l, key: key, done: make(chan struct{}), since: time.Now()}
			l.last[key] = mine
			l.mu.Unlock()
			return mine, nil
		}
		l.mu.Unlock()
		select {
		case <-before.done:
		case <-time.After(time.Until(late)):
			return nil, ErrHangs
		}
	}
}
