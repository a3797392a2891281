package sys

import (
	"errors"
	"sync"
	"time"
)

const (
	// lookTime bounds how long a caller waits.
	lookTime = time.Second
	// maxHung bounds the calls that take longer. Each of them occupies a thread.
	maxHung = 64
)

// ErrHangs is returned when see takes too long, for example on a file whose server does not answer.
var ErrHangs = errors.New("it hangs, as on a filesystem with a server that does not answer")

// Looks bounds system calls on files and devices of others, which may hang in the kernel: one call at a
// time per key, and no caller waits longer than lookTime. The zero value is ready to use.
type Looks[K comparable] struct {
	mu   sync.Mutex
	last map[K]*look
	hung int
}

type look struct {
	done chan struct{}
	hung bool
}

// Look runs see. After ErrHangs see is still running, so it must not change data of the caller.
func Look[K comparable, V any](l *Looks[K], key K, see func() (V, error)) (seen V, err error) {
	late := time.NewTimer(lookTime)
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
	defer l.mu.Unlock()
	if l.last[key] == mine {
		mine.hung = true
		l.hung++
	}
	return seen, ErrHangs
}

// begin waits until no other call for the key is running.
func (l *Looks[K]) begin(key K, late <-chan time.Time) (*look, error) {
	for {
		l.mu.Lock()
		before := l.last[key]
		if l.hung >= maxHung || before != nil && before.hung {
			l.mu.Unlock()
			return nil, ErrHangs
		}
		if before == nil {
			if l.last == nil {
				l.last = make(map[K]*look)
			}
			mine := &look{done: make(chan struct{})}
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
	defer l.mu.Unlock()
	delete(l.last, key)
	if mine.hung {
		l.hung--
	}
	close(mine.done)
}
