package stats

import (
	"context"
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// slots bounds how many requests run at once. A request that turns out to be slow moves to a slot of its own kind, so
// that any number of hung sandboxes leaves all quick slots to the others.
type slots struct {
	limits Limits
	quick  chan struct{}
	slow   chan struct{}
}

func (s *slots) run(ctx context.Context, v *volume.Volume, request func() error) error {
	select {
	case s.quick <- struct{}{}:
	default: // a free slot counts even if ctx has ended
		select {
		case s.quick <- struct{}{}:
		case <-ctx.Done():
			return volume.Errorf(volume.Exhausted, "volume %s: too many sandboxes are being asked at once, "+
				"and many of them are slow: raise relay.concurrency or relay.maxSlow: %w", v.Target, ctx.Err())
		}
	}
	own := &slot{slots: s}
	if s.limits.SlowAfter > 0 {
		timer := time.AfterFunc(s.limits.SlowAfter, own.moveToSlow)
		defer timer.Stop()
	}
	defer own.free()
	return request()
}

// slot is the slot of one request: quick at first, slow later on.
type slot struct {
	slots *slots
	mu    sync.Mutex
	slow  bool
	freed bool
}

// moveToSlow swaps the quick slot for a slow one if one is free. Otherwise the
// request keeps its quick slot, and concurrency stays bounded.
func (s *slot) moveToSlow() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.freed {
		return
	}
	select {
	case s.slots.slow <- struct{}{}:
		s.slow = true
		<-s.slots.quick
	default:
	}
}

func (s *slot) free() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.freed = true
	if s.slow {
		<-s.slots.slow
		return
	}
	<-s.slots.quick
}
