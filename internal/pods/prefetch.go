package pods

import (
	"context"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/util/flowcontrol"
)

// Prefetching is slow: when a daemon is updated on every node at once, the API server must
// not feel it. A lookup does not wait for it.
const (
	prefetchAtOnce = 4
	prefetchRate   = 50 // pods a second
	prefetchBurst  = 100
	// A claim that is not bound may never be.
	prefetchFirst = time.Second
	prefetchLast  = 5 * time.Minute
)

// prefetcher learns who gives the volumes of new pods before somebody asks, so that it
// is known when the API server is away.
type prefetcher struct {
	c     *Cluster
	rate  flowcontrol.RateLimiter
	mu    sync.Mutex
	tried map[string]attempt // by the pod's uid
}

// attempt is when to try a pod again.
type attempt struct {
	next time.Time
	wait time.Duration
}

// run learns until ctx ends.
func (p *prefetcher) run(ctx context.Context) {
	p.rate = flowcontrol.NewTokenBucketRateLimiter(prefetchRate, prefetchBurst)
	for ctx.Err() == nil {
		changed := p.c.changes.wait()
		again := time.NewTimer(p.round(ctx))
		select {
		case <-ctx.Done():
		case <-changed:
		case <-again.C:
		}
		again.Stop()
	}
}

// round tries all pods that are due, and gives the time until the next one is.
func (p *prefetcher) round(ctx context.Context) time.Duration {
	if p.c.health.problem(identity, allPods) != nil {
		return prefetchFirst // nobody would answer
	}
	var group errgroup.Group
	group.SetLimit(prefetchAtOnce)
	for _, k := range p.due() {
		group.Go(func() error {
			if p.rate.Wait(ctx) == nil {
				p.note(k.pod.uid, len(p.c.resolver.learn(ctx, k)) == 0)
			}
			return nil
		})
	}
	_ = group.Wait() // no part of it gives an error
	return p.pause()
}

// due are the pods of which something is to be learned now.
func (p *prefetcher) due() []known {
	p.mu.Lock()
	defer p.mu.Unlock()
	open := p.c.pods.choose(known.incomplete)
	kept := make(map[string]attempt, len(open))
	var due []known
	slices.Reverse(open) // the pod that came last is the one that is being started
	for _, k := range open {
		kept[k.pod.uid] = p.tried[k.pod.uid]
		if !kept[k.pod.uid].next.After(time.Now()) {
			due = append(due, k)
		}
	}
	p.tried = kept // of those that are gone nothing is kept
	return due
}

func (p *prefetcher) note(uid string, done bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if done {
		delete(p.tried, uid)
		return
	}
	wait := min(max(2*p.tried[uid].wait, prefetchFirst), prefetchLast)
	p.tried[uid] = attempt{next: time.Now().Add(wait), wait: wait}
}

func (p *prefetcher) pause() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	pause := prefetchLast
	for _, one := range p.tried {
		pause = min(pause, time.Until(one.next))
	}
	return max(pause, 0)
}
