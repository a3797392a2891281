package stats

import (
	"context"
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// places bounds how many requests are under way. A request that turns out to be
// slow gives its place back and is counted apart, so that any number of hung
// sandboxes leaves the quick ones all their places.
type places struct {
	quick chan struct{}
	slow  chan struct{}
}

func newPlaces(l Limits) *places {
	return &places{quick: make(chan struct{}, max(1, l.Concurrency)), slow: make(chan struct{}, max(1, l.MaxSlow))}
}

// with runs a request in a place.
func (p *places) with(ctx context.Context, v *deferral.Volume, l Limits, request func() error) error {
	select {
	case p.quick <- struct{}{}:
	default:
		if err := p.waitForPlace(ctx, v); err != nil {
			return err
		}
	}
	seat := &seat{places: p}
	if l.SlowAfter > 0 {
		timer := time.AfterFunc(l.SlowAfter, seat.moveToSlow)
		defer timer.Stop()
	}
	defer seat.leave()
	return request()
}

func (p *places) waitForPlace(ctx context.Context, v *deferral.Volume) error {
	select {
	case p.quick <- struct{}{}:
		return nil
	case <-ctx.Done():
		return deferral.Errorf(deferral.Exhausted, "volume %s: too many sandboxes are being asked at once, "+
			"and many of them are slow: raise relay.concurrency or relay.maxSlow: %w", v.Target, ctx.Err())
	}
}

// seat is the place of one request: quick at first, slow later on.
type seat struct {
	places *places
	mu     sync.Mutex
	slow   bool
	left   bool
}

// moveToSlow swaps the quick place for a slow one if there is one; else the
// request keeps its place, and concurrency stays bounded.
func (s *seat) moveToSlow() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left {
		return
	}
	select {
	case s.places.slow <- struct{}{}:
		s.slow = true
		<-s.places.quick
	default:
	}
}

func (s *seat) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left = true
	if s.slow {
		<-s.places.slow
		return
	}
	<-s.places.quick
}
