package pods

import (
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// watchHealth is the health of the watches. A single failed get says nothing about it.
type watchHealth struct {
	mu   sync.Mutex
	last time.Time // when the API server last answered
	bad  map[string]failure
	log  *zap.Logger
}

func newWatchHealth(log *zap.Logger) *watchHealth {
	return &watchHealth{bad: make(map[string]failure), log: log}
}

// failure is what is wrong with one watch, and since when.
type failure struct {
	err     error
	since   time.Time
	watched bool // a watch has failed, and lists may work
}

// good records that a watch, or reading the kubeconfig, works. Only a watch ends a failure of a watch.
func (h *watchHealth) good(what string, watched bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last = time.Now()
	if was, there := h.bad[what]; there && (watched || !was.watched) {
		delete(h.bad, what)
		h.log.Info("followed again", zap.String("what", what), zap.Duration("after", time.Since(was.since)))
	}
}

// failed records that a watch does not work. Only the first failure is logged: a server
// that is away for an hour is one event.
func (h *watchHealth) failed(what string, watched bool, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	was, there := h.bad[what]
	if !there {
		was.since = time.Now()
		h.log.Warn("cannot be followed", zap.String("what", what), zap.Error(err))
	}
	was.watched = was.watched || watched
	was.err = volume.Errorf(volume.Timeout, "%s cannot be followed since %s: %w", what, was.since.UTC().Format(time.RFC3339), err)
	h.bad[what] = was
}

// problem is the first problem of some watches, or nil.
func (h *watchHealth) problem(whats ...string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, what := range whats {
		if bad, there := h.bad[what]; there {
			return bad.err
		}
	}
	return nil
}

// state lists all problems, and returns when the API server last answered.
func (h *watchHealth) state() (problems []string, last time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, what := range slices.Sorted(maps.Keys(h.bad)) {
		problems = append(problems, h.bad[what].err.Error())
	}
	return problems, h.last
}
