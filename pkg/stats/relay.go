// Package stats relays usage and growth between callers and the sandboxes of
// deferred volumes, so that a sandbox which hangs hurts only its own volume: one
// request in flight for each volume, shared by all who ask; a deadline of each
// caller's own; bounded concurrency, out of which a slow request steps.
package stats

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// Source is who can be asked about a volume.
type Source interface {
	Stats(ctx context.Context, v *deferral.Volume) (deferral.Report, error)
	Resize(ctx context.Context, v *deferral.Volume, r deferral.Range) (int64, error)
}

// Limits bound what the relay asks of sandboxes.
type Limits struct {
	// StatsTimeout and ExpandTimeout end a request, whatever its callers allow.
	StatsTimeout  time.Duration
	ExpandTimeout time.Duration
	// Concurrency is how many quick requests are under way at once.
	Concurrency int
	// SlowAfter is when a request gives its place to another and goes on as a
	// slow one; MaxSlow is how many slow ones there may be.
	SlowAfter time.Duration
	MaxSlow   int
}

// Answer is a fresh report.
type Answer struct {
	deferral.Report
	Took time.Duration
}

// Known is what was learned of a volume last.
type Known struct {
	deferral.Report
	At time.Time
	// Err is what went wrong since, or nil.
	Err   error
	ErrAt time.Time
	// Took is how long the last request took, and AskedAt when it ended, however
	// it ended.
	Took    time.Duration
	AskedAt time.Time
	// Requests counts the requests since the volume, or its sandbox, is new;
	// Failures counts those that failed.
	Requests, Failures int64
	// GrowErr is why the filesystem did not grow when that was asked for last, or
	// nil. Usage that comes in since says nothing about it.
	GrowErr   error
	GrowErrAt time.Time
}

// Relay asks sandboxes.
type Relay struct {
	mu      sync.Mutex
	limits  Limits
	places  *places
	flights map[deferral.Key]*flight
	known   map[deferral.Key]Known
	// asked is told of every request that ended; it may be nil.
	asked func(v *deferral.Volume, call string, took time.Duration, err error)
}

// flight is one request under way, shared by its callers.
type flight struct {
	done   chan struct{}
	answer Answer
	err    error
}

// New makes a relay. Asked, which may be nil, is told of every request to a
// sandbox when it has ended.
func New(limits Limits, asked func(v *deferral.Volume, call string, took time.Duration, err error)) *Relay {
	return &Relay{
		limits: limits, places: newPlaces(limits), asked: asked,
		flights: make(map[deferral.Key]*flight), known: make(map[deferral.Key]Known),
	}
}

// SetLimits changes the limits for requests from now on.
func (r *Relay) SetLimits(limits Limits) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.limits = limits
	r.places = newPlaces(limits)
}

// Stats asks the sandbox of a volume, or waits for the answer to who asked
// before. The caller's own deadline ends its waiting and nobody else's.
func (r *Relay) Stats(ctx context.Context, src Source, v *deferral.Volume) (Answer, error) {
	if err := ctx.Err(); err != nil {
		return Answer{}, waitError(ctx, v)
	}
	f, first := r.join(v.Key)
	if !first {
		return wait(ctx, f, v)
	}
	if ctx.Done() == nil {
		r.fly(ctx, src, v, f)
		return f.answer, f.err
	}
	// The request outlives a caller that gives up: others may have joined, and
	// the usage it brings is worth knowing.
	go r.fly(context.WithoutCancel(ctx), src, v, f)
	return wait(ctx, f, v)
}

func (r *Relay) join(key deferral.Key) (f *flight, first bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if f, ok := r.flights[key]; ok {
		return f, false
	}
	f = &flight{done: make(chan struct{})}
	r.flights[key] = f
	return f, true
}

func wait(ctx context.Context, f *flight, v *deferral.Volume) (Answer, error) {
	select {
	case <-f.done:
		return f.answer, f.err
	case <-ctx.Done():
		return Answer{}, waitError(ctx, v)
	}
}

func waitError(ctx context.Context, v *deferral.Volume) error {
	kind := deferral.Canceled
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		kind = deferral.Timeout
	}
	return deferral.Errorf(kind, "volume %s: its sandbox did not answer within the time that the caller allows: %w",
		v.Target, ctx.Err())
}

// fly makes the request and tells everybody who waits.
func (r *Relay) fly(ctx context.Context, src Source, v *deferral.Volume, f *flight) {
	limits, places := r.current()
	ctx, cancel := context.WithTimeout(ctx, limits.StatsTimeout)
	defer cancel()
	start := time.Now()
	f.err = places.with(ctx, v, limits, func() (err error) {
		f.answer.Report, err = src.Stats(ctx, v)
		return err
	})
	f.answer.Took = time.Since(start)
	r.learn(v, f)
	close(f.done)
	if r.asked != nil {
		r.asked(v, "stats", f.answer.Took, f.err)
	}
}

func (r *Relay) current() (Limits, *places) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.limits, r.places
}

// learn keeps what a flight brought, unless the volume was forgotten meanwhile.
func (r *Relay) learn(v *deferral.Volume, f *flight) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.flights[v.Key] != f {
		return
	}
	delete(r.flights, v.Key)
	r.known[v.Key] = r.known[v.Key].after(f, time.Now())
}

// after is what is known when one more request has ended.
func (k Known) after(f *flight, now time.Time) Known {
	k.Took, k.AskedAt = f.answer.Took, now
	k.Requests++
	if f.err != nil {
		k.Failures++
		k.Err, k.ErrAt = f.err, now
		return k
	}
	k.Report, k.At, k.Err, k.ErrAt = f.answer.Report, now, nil, time.Time{}
	return k
}

// Known tells what was learned of a volume last.
func (r *Relay) Known(key deferral.Key) (Known, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known, ok := r.known[key]
	return known, ok
}

// Forget drops what is known of a volume that went away, or whose sandbox did.
// A request still under way will not be remembered, nor joined any more.
func (r *Relay) Forget(key deferral.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.known, key)
	delete(r.flights, key)
}

// Expand asks the sandbox of a volume to grow its filesystem. Growing is not
// shared: two callers may wish for two sizes.
func (r *Relay) Expand(ctx context.Context, src Source, v *deferral.Volume, wish deferral.Range) (size int64, err error) {
	if wish.Required < 0 || wish.Limit < 0 || (wish.Limit > 0 && wish.Required > wish.Limit) {
		return 0, deferral.Errorf(deferral.Invalid,
			"volume %s: the capacity range (required %d, limit %d) holds no size", v.Target, wish.Required, wish.Limit)
	}
	limits, places := r.current()
	ctx, cancel := context.WithTimeout(ctx, limits.ExpandTimeout)
	defer cancel()
	start := time.Now()
	err = places.with(ctx, v, limits, func() (err error) {
		size, err = src.Resize(ctx, v, wish)
		return err
	})
	r.learnGrowth(v.Key, err)
	if r.asked != nil {
		r.asked(v, "expand", time.Since(start), err)
	}
	return size, err
}

// learnGrowth keeps how the last growth ended: kubelet makes no event of one that
// has to wait until the volume is out of use.
func (r *Relay) learnGrowth(key deferral.Key, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known, ok := r.known[key]
	switch {
	case err != nil:
		known.GrowErr, known.GrowErrAt = err, time.Now()
	case ok:
		known.GrowErr, known.GrowErrAt = nil, time.Time{}
	default:
		return
	}
	r.known[key] = known
}
