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
	// Time bounds how long a caller waits; 0 is lookTime.
	Time time.Duration
	// Most bounds the calls that take longer, each of which occupies a thread; 0 is maxHung.
	Most int
	// Changed, which may be nil, is called for a key that hangs, and when it does no longer.
	Changed func(K)

	mu   sync.Mutex
	last map[K]*look
	hung int
}

type look struct {
	done  chan struct{}
	since time.Time
	hung  bool
}

// Look runs see. After ErrHangs see is still running, so it must not change data of the caller.
func Look[K comparable, V any](l *Looks[K], key K, see func() (V, error)) (seen V, err error) {
	late := time.NewTimer(cmp.Or(l.Time, lookTime))
	defer late.Stop()
	mine, err := l.begin(key, late.C)
	if err != nil {
		return seen, err
	}
	type result struct {
		seen V
		err  error
	}
	out := make(chan result, 1)
	go func() {
		seen, err := see()
		out <- result{seen, err}
		l.end(key, mine)
	}()
	select {
	case got := <-out:
		return got.seen, got.err
	case <-late.C:
	}
	l.mu.Lock()
	if l.last[key] != mine { // it has just ended
		l.mu.Unlock()
		got := <-out
		return got.seen, got.err
	}
	mine.hung = true
	l.hung++
	l.mu.Unlock()
	l.changed(key)
	return seen, ErrHangs
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

// begin waits until no other call for the key is running.
func (l *Looks[K]) begin(key K, late <-chan time.Time) (*look, error) {
	for {
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
				l.last = make(map[K]*look)
			}
			mine := &look{done: make(chan struct{}), since: time.Now()}
			l.last[key] = mine
			l.mu.Unlock()
			return mine, nil
		}
		l.mu.Unlock()
		select {
		case <-before.done:
		case <-late:
			return nil, ErrHangs
		}
	}
}

func (l *Looks[K]) end(key K, mine *look) {
	l.mu.Lock()
	delete(l.last, key)
	if mine.hung {
		l.hung--
	}
	l.mu.Unlock()
	close(mine.done)
	if mine.hung {
		l.changed(key)
	}
}
