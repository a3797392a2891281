package cluster

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// contact is how the watches stand. A single get that fails says nothing of them.
type contact struct {
	mu   sync.Mutex
	last time.Time // when the API server was last heard of
	bad  map[string]trouble
	log  *zap.Logger
}

// trouble is what is wrong with one watch, and since when.
type trouble struct {
	err   error
	since time.Time
}

// good notes that a watch, or the reading of the kubeconfig, works.
func (c *contact) good(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last = time.Now()
	if was, there := c.bad[what]; there {
		delete(c.bad, what)
		c.log.Info("followed again", zap.String("what", what), zap.Duration("after", time.Since(was.since)))
	}
}

// failed notes that a watch does not work. Only the first failure is logged: a
// server that is away for an hour is one event.
func (c *contact) failed(what string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	was, there := c.bad[what]
	if !there {
		was.since = time.Now()
		c.log.Warn("cannot be followed", zap.String("what", what), zap.Error(err))
	}
	if c.bad == nil {
		c.bad = make(map[string]trouble)
	}
	c.bad[what] = trouble{err: err, since: was.since}
}

// problem is what is wrong with the first of some watches, or nil.
func (c *contact) problem(whats ...string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, what := range whats {
		if bad, there := c.bad[what]; there {
			return deferral.Errorf(deferral.Timeout, "%s cannot be followed since %s: %w", what,
				bad.since.UTC().Format(time.RFC3339), bad.err)
		}
	}
	return nil
}

// problems are all that is wrong.
func (c *contact) problems() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []string
	for _, what := range slices.Sorted(maps.Keys(c.bad)) {
		bad := c.bad[what]
		out = append(out, fmt.Sprintf("%s cannot be followed since %s: %v", what, bad.since.UTC().Format(time.RFC3339), bad.err))
	}
	return out
}

func (c *contact) lastHeard() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}
