package deferral

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// slow is how long one volume may take before the others no longer wait for it.
	slow = 500 * time.Millisecond
	// mostWorkers bounds how many volumes are worked on at a time. If many hang, the start must not take longer than
	// systemd waits for it.
	mostWorkers = maxLeft + 16
	// leaveTime is how long one volume may take before it is left behind: two seconds, besides those that a
	// removal waits for processes that are ending.
	leaveTime = claim.ReleaseTime + 2*time.Second
	// maxLeft is how many volumes may be left behind before no other is begun with.
	maxLeft = claim.MostHung
)

// pass calls a function for volumes. Its workers make the calls themselves: a goroutine for each would cost as
// much as the call.
type pass struct {
	table *table
	ended func() error // of the caller's context
	f     func(*entry)
	done  chan struct{} // no worker is left

	mu      sync.Mutex
	rest    []*entry
	workers int
}

// each calls f for volumes, with one worker less than there are processors, so that one is left to calls, if any are
// served yet. When a volume takes long, because its disk or its runtime hangs, each starts a further worker for the others, and leaves
// the volume behind in the end, with the worker. Then f goes on, without a context that ends, and the volume is
// skipped by others until it returns.
func (t *table) each(ctx context.Context, volumes []*entry, f func(context.Context, *entry)) error {
	if len(volumes) == 0 {
		return ctx.Err()
	}
	forEver := context.WithoutCancel(ctx)
	p := &pass{table: t, ended: ctx.Err, f: func(known *entry) { f(forEver, known) }, done: make(chan struct{}), rest: volumes}
	workers := runtime.GOMAXPROCS(0)
	if t.serving.Load() {
		workers = max(1, workers-1)
	}
	for range workers {
		p.another()
	}
	<-p.done
	return ctx.Err()
}

// another starts a worker, if there is work.
func (p *pass) another() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.rest) > 0 && p.workers < mostWorkers {
		p.workers++
		go p.work()
	}
}

func (p *pass) work() {
	for known := p.next(); known != nil; known = p.next() {
		if left := p.call(known); left {
			return // another one has its place
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.workers--; p.workers == 0 {
		close(p.done)
	}
}

// next takes a volume, or nil if there is no more work.
func (p *pass) next() *entry {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.rest) == 0 || p.ended() != nil {
		p.rest = nil
		return nil
	}
	known := p.rest[0]
	p.rest = p.rest[1:]
	return known
}

func (p *pass) call(known *entry) (left bool) {
	began := time.Now()
	late := time.AfterFunc(slow, p.another)
	defer late.Stop()
	running, err := p.table.work.Begin(known.rec.Key)
	if errors.Is(err, sys.ErrManyHang) {
		p.table.setProblem(known.rec.Key, volume.Errorf(volume.Busy, "volume %s: it is not checked while %d others do not answer", known.rec.Target, maxLeft))
	}
	if err != nil {
		return false
	}
	leave := time.AfterFunc(leaveTime-time.Since(began), func() {
		if running.Leave() {
			p.work()
		}
	})
	defer leave.Stop()
	p.f(known)
	return running.End()
}
