package pods

import (
	"maps"
	"sync"
	"time"
)

// maxRetries bounds how much is remembered.
const maxRetries = 4096

// retries remembers what could not be learned, so that it is not tried again before a time
// that doubles with each try.
type retries struct {
	first, last time.Duration

	mu  sync.Mutex
	all map[string]retry
}

type retry struct {
	err  error
	next time.Time // when it is tried again
	wait time.Duration
}

// lately gives the error of what need not be tried again yet.
func (r *retries) lately(key string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if one, known := r.all[key]; known && time.Now().Before(one.next) {
		return one.err
	}
	return nil
}

// note keeps how a try ended; nothing is remembered of one without an error.
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
