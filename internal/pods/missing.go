package pods

import (
	"maps"
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// A claim that was not there, or not bound, is asked for again after a time that
	// doubles with each try.
	missingFirst = 250 * time.Millisecond
	missingLast  = 30 * time.Second
	// maxMissingClaims bounds how many are remembered.
	maxMissingClaims = 4096
)

// missing remembers claims that could not be resolved, so that those who ask again
// and again do not have the API server asked each time.
type missing struct {
	mu     sync.Mutex
	claims map[string]missed
}

type missed struct {
	err  error
	next time.Time // when it is asked for again
	wait time.Duration
}

// lately gives the error of a claim that need not be asked for again yet.
func (m *missing) lately(key string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if one, known := m.claims[key]; known && time.Now().Before(one.next) {
		return one.err
	}
	return nil
}

// note keeps how a claim was resolved. Where the API server did not answer, that
// says nothing of the claim.
func (m *missing) note(key string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil || volume.KindOf(err) == volume.Timeout {
		delete(m.claims, key)
		return
	}
	if m.claims == nil {
		m.claims = make(map[string]missed)
	}
	before, known := m.claims[key]
	if !known && len(m.claims) >= maxMissingClaims {
		now := time.Now()
		maps.DeleteFunc(m.claims, func(_ string, one missed) bool { return now.After(one.next) })
		if len(m.claims) >= maxMissingClaims {
			return
		}
	}
	wait := min(max(2*before.wait, missingFirst), missingLast)
	m.claims[key] = missed{err: err, next: time.Now().Add(wait), wait: wait}
}
