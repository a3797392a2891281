// Package stats relays usage and growth between callers and the sandboxes of deferred volumes. A sandbox that hangs
// hurts only its own volume: each volume has at most one usage request in flight, which all callers share; each caller
// has its own deadline; concurrency is bounded, and slow requests are counted apart.
package stats

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/step"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Source forwards requests to the sandbox of a volume.
type Source interface {
	Stats(ctx context.Context, v *volume.Volume) (volume.Report, error)
	Resize(ctx context.Context, v *volume.Volume, r volume.Range) (int64, error)
}

// Limits bound what the relay asks of sandboxes.
type Limits struct {
	// StatsTimeout and ExpandTimeout end a request, whatever its callers allow.
	StatsTimeout  time.Duration
	ExpandTimeout time.Duration
	// Concurrency is how many quick requests are under way at once.
	Concurrency int
	// SlowAfter is when a request frees its slot and goes on as a slow one; MaxSlow is how many slow ones there may be.
	SlowAfter time.Duration
	MaxSlow   int
}

// Answer is a fresh report.
type Answer struct {
	volume.Report
	Took time.Duration
}

// Known is the latest information about a volume.
type Known struct {
	volume.Report
	At time.Time
	// Err is what went wrong since, or nil.
	Err   error
	ErrAt time.Time
	// Took is how long the last request took, and AskedAt when it ended, also if it failed.
	Took    time.Duration
	AskedAt time.Time
	// Requests counts the requests to the volume's current sandbox; Failures counts those that failed.
	Requests, Failures int64
	// GrowErr is why the last attempt to grow the filesystem failed, or nil. Later usage reports do not clear it.
	GrowErr   error
	GrowErrAt time.Time
	// LostAt is when the volume lost the sandbox that had answered, if it has no other.
	LostAt time.Time
}

// HadSandbox reports whether a sandbox has answered, even if it is gone.
func (k Known) HadSandbox() bool { return !k.At.IsZero() || !k.LostAt.IsZero() }

// Relay sends requests to sandboxes and keeps the latest answers.
type Relay struct {
	slots   atomic.Pointer[slots]
	mu      sync.Mutex
	flights map[volume.Key]*flight
	known   map[volume.Key]Known
	growing map[volume.Key]*int // how many growths of a volume are under way
	hung    map[volume.Key]int  // how many requests of a volume were left behind; also of those that were forgotten
	// attempts are those that somebody makes, or made a moment ago.
	attempts sys.KeyLocks[attempt]
	// asked is called after every request; it may be nil.
	asked func(v *volume.Volume, call string, took time.Duration, err error)
}

// flight is one request under way, shared by its callers.
type flight struct {
	done chan struct{}
	// rebound is set when the volume moved to another sandbox meanwhile; sandbox is
	// the new one, or "". Both are guarded by Relay.mu.
	rebound bool
	sandbox string
	answer  Answer
	err     error
}

// New makes a relay. It calls asked, which may be nil, after every request to a sandbox.
func New(limits Limits, asked func(v *volume.Volume, call string, took time.Duration, err error)) *Relay {
	r := &Relay{asked: asked, flights: make(map[volume.Key]*flight), known: make(map[volume.Key]Known), growing: make(map[volume.Key]*int), hung: make(map[volume.Key]int)}
	r.SetLimits(limits)
	return r
}

// SetLimits changes the limits of new requests. Requests under way count as long as the limits stay.
func (r *Relay) SetLimits(limits Limits) {
	if now := r.slots.Load(); now == nil || now.limits != limits {
		r.slots.Store(&slots{limits: limits, quick: make(chan struct{}, max(1, limits.Concurrency)), slow: make(chan struct{}, max(1, limits.MaxSlow))})
	}
}

// Stats asks the sandbox of a volume, or waits for a request that is in flight. The
// caller's deadline ends only its own wait.
func (r *Relay) Stats(ctx context.Context, src Source, v *volume.Volume) (Answer, error) {
	if err := ctx.Err(); err != nil {
		return Answer{}, waitError(ctx, v)
	}
	ctx, end := step.Begin(ctx, "ask the sandbox")
	defer end()
	f, first := r.join(v.Key)
	if first {
		// The request outlives a caller that gives up: others may have joined, and its answer is still worth keeping.
		go r.run(context.WithoutCancel(ctx), src, v, f)
	}
	select {
	case <-f.done:
		return f.answer, f.err
	case <-ctx.Done():
		return Answer{}, waitError(ctx, v)
	}
}

func (r *Relay) join(key volume.Key) (f *flight, first bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if f, ok := r.flights[key]; ok && !f.rebound {
		return f, false
	}
	f = &flight{done: make(chan struct{})}
	r.flights[key] = f
	return f, true
}

func waitError(ctx context.Context, v *volume.Volume) error {
	return volume.Errorf(volume.ContextKind(ctx.Err()),
		"volume %s: its sandbox did not answer within the time that the caller allows: %w", v.Target, ctx.Err())
}

func (r *Relay) run(ctx context.Context, src Source, v *volume.Volume, f *flight) {
	slots := r.slots.Load()
	ctx, cancel := context.WithTimeout(ctx, slots.limits.StatsTimeout)
	defer cancel()
	start := time.Now()
	var report volume.Report // of its own: a request that was left behind still writes
	if f.err = r.ask(ctx, slots, v, func() (err error) { report, err = src.Stats(ctx, v); return err }); f.err == nil {
		f.answer.Report = report
	}
	f.answer.Took = time.Since(start)
	r.learn(v, f)
	close(f.done)
	if r.asked != nil {
		r.asked(v, "stats", f.answer.Took, f.err)
	}
}

// leaveTime is how long a request may go on when its time is over. Sources heed that as a rule.
const leaveTime = time.Second

// ask makes a request in a slot. One that ignores the end of ctx, as a system call that hangs does, is left behind: it
// keeps its slot, which bounds the threads, and its volume is not asked again until it returns, so that it costs one slot.
func (r *Relay) ask(ctx context.Context, slots *slots, v *volume.Volume, request func() error) error {
	r.mu.Lock()
	hangs := r.hung[v.Key] > 0
	r.mu.Unlock()
	if hangs {
		return hangError(volume.Timeout, v)
	}
	out, left := make(chan error, 1), false
	go func() {
		err := slots.run(ctx, v, request)
		r.mu.Lock()
		defer r.mu.Unlock()
		if out <- err; !left {
			return
		}
		if r.hung[v.Key]--; r.hung[v.Key] == 0 {
			delete(r.hung, v.Key)
		}
	}()
	select {
	case err := <-out:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-out:
		return err
	case <-time.After(leaveTime):
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(out) > 0 { // it has just returned
		return <-out
	}
	left = true
	r.hung[v.Key]++
	return hangError(volume.ContextKind(ctx.Err()), v)
}

func hangError(kind volume.Kind, v *volume.Volume) error {
	return volume.Errorf(kind, "volume %s: a request to its sandbox was left behind, and the sandbox is not asked again "+
		"until that returns: %w", v.Target, sys.ErrHangs)
}

// learn stores the answer, unless the volume was forgotten meanwhile or the answer is from its previous sandbox.
func (r *Relay) learn(v *volume.Volume, f *flight) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.flights[v.Key] != f {
		return
	}
	delete(r.flights, v.Key)
	if f.rebound && (f.err != nil || f.sandbox == "" || f.answer.Sandbox != f.sandbox) {
		return
	}
	k, now := r.known[v.Key], time.Now()
	k.Took, k.AskedAt = f.answer.Took, now
	k.Requests++
	if f.err != nil {
		k.Failures++
		k.Err, k.ErrAt = f.err, now
	} else {
		k.Report, k.At, k.Err, k.ErrAt, k.LostAt = f.answer.Report, now, nil, time.Time{}, time.Time{}
	}
	r.known[v.Key] = k
}

// Known returns the latest information about a volume.
func (r *Relay) Known(key volume.Key) (Known, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known, ok := r.known[key]
	return known, ok
}

// Rebound drops what is known of a volume that moved to another sandbox, or records that it
// has none (""). Nobody joins a request in flight any more. Its answer counts only if the new
// sandbox gave it: often that request is what found the new sandbox.
func (r *Relay) Rebound(key volume.Key, sandbox string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.known[key].HadSandbox() && sandbox == "" {
		r.known[key] = Known{LostAt: time.Now()}
	} else {
		delete(r.known, key)
	}
	if f, ok := r.flights[key]; ok {
		f.rebound, f.sandbox = true, sandbox
	}
}

// Forget drops what is known of a volume that was removed. The answer to a request in
// flight, or how a growth ends, is not stored, and nobody joins that request any more.
func (r *Relay) Forget(key volume.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.known, key)
	delete(r.flights, key)
	delete(r.growing, key)
}

// attempt is to have a sandbox grow a volume to a size that is on record.
type attempt struct {
	key     volume.Key
	sandbox string
	size    int64
}

// BeginAttempt reports whether nobody makes the attempt yet. Then it lasts until the caller calls end.
func (r *Relay) BeginAttempt(key volume.Key, sandbox string, size int64) (end func(), first bool) {
	return r.attempts.TryLock(attempt{key, sandbox, size})
}

// Expand asks the sandbox of a volume to grow its filesystem. Growing is not
// shared: two callers may wish for two sizes.
func (r *Relay) Expand(ctx context.Context, src Source, v *volume.Volume, wish volume.Range) (size int64, err error) {
	if wish.Required < 0 || wish.Limit < 0 || (wish.Limit > 0 && wish.Required > wish.Limit) {
		return 0, volume.Errorf(volume.Invalid,
			"volume %s: the capacity range (required %d, limit %d) holds no size", v.Target, wish.Required, wish.Limit)
	}
	ctx, end := step.Begin(ctx, "ask the sandbox")
	defer end()
	slots := r.slots.Load()
	ctx, cancel := context.WithTimeout(ctx, slots.limits.ExpandTimeout)
	defer cancel()
	start := time.Now()
	others := r.beginGrowth(v.Key)
	var grown int64
	if err = r.ask(ctx, slots, v, func() (err error) { grown, err = src.Resize(ctx, v, wish); return err }); err == nil {
		size = grown
	}
	r.endGrowth(v.Key, others, err)
	if r.asked != nil {
		r.asked(v, "expand", time.Since(start), err)
	}
	return size, err
}

func (r *Relay) beginGrowth(key volume.Key) (others *int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	others = r.growing[key]
	if others == nil {
		others = new(int)
		r.growing[key] = others
	}
	*others++
	return others
}

// endGrowth stores how a growth ended, unless the volume was forgotten meanwhile.
func (r *Relay) endGrowth(key volume.Key, others *int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.growing[key] != others {
		return
	}
	if *others--; *others == 0 {
		delete(r.growing, key)
	}
	r.learnGrowth(key, err)
}

// learnGrowth stores how the last growth ended: kubelet emits no event for one that has to wait until the volume is out
// of use. An impossible size is a mistake of the caller, who gets that error. Neither that, nor a missing sandbox, nor
// one that cannot grow any volume says anything about this one. The caller holds the lock.
func (r *Relay) learnGrowth(key volume.Key, err error) {
	kind := volume.KindOf(err) // of nil Internal
	if kind == volume.Invalid || kind == volume.OutOfRange || kind == volume.NoSandbox || errors.Is(err, volume.ErrNeverGrows) {
		return
	}
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
