package pods

import (
	"maps"
	"sync"
	"time"
)

// maxRetries bounds the memory.
const maxRetries = 4096

// retries remembers what could not be learned, and delays the next attempt. The delay
// doubles with each attempt.
type retries struct {
	first, last time.Duration

	mu  sync.Mutex
	all map[string]retry
}

type retry struct {
	err  error
	next time.Time // of the next attempt
	wait time.Duration
}

// recentError returns the error of the last attempt while the next one is not due, else nil.
func (r *retries) recentError(key string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if one, known := r.all[key]; known && time.Now().Before(one.next) {
		return one.err
	}
	return nil
}

// note records the outcome of an attempt. A success is forgotten.
func (r *retries) note(key string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		delete(r.all, key)
		return
	}
	if r.all == nil {
		r.all = make(map[string]retry)
	}
	before, known := r.all[key]
	if !known && len(r.all) >= maxRetries {
		now := time.Now()
		maps.DeleteFunc(r.all, func(_ string, one retry) bool { return now.After(one.next) })
		if len(r.all) >= maxRetries {
			return
		}
	}
	wait := min(max(2*before.wait, r.first), r.last)
	r.all[key] = retry{err: err, next: time.Now().Add(wait), wait: wait}
}
