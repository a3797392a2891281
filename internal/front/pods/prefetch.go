package pods

import (
	"context"
	"errors"
	"slices"
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
	// A claim that is not bound may never be bound.
	prefetchFirst = time.Second
	prefetchLast  = 5 * time.Minute
)

var errIncomplete = errors.New("a volume of the pod is not known")

// prefetcher learns the sources of new pods' volumes before they are looked up, so that they
// are known when the API server is away.
type prefetcher struct {
	pods     *pods
	resolver *resolver
	rate     flowcontrol.RateLimiter
	tried    retries // by the pod's uid
}

func newPrefetcher(pods *pods, resolver *resolver) *prefetcher {
	return &prefetcher{
		pods: pods, resolver: resolver, tried: newRetries(prefetchFirst, prefetchLast),
		rate: flowcontrol.NewTokenBucketRateLimiter(prefetchRate, prefetchBurst),
	}
}

// run learns until ctx ends.
func (p *prefetcher) run(ctx context.Context) {
	for ctx.Err() == nil {
		changed := p.pods.table.changes.wait()
		again := time.NewTimer(p.round(ctx))
		select {
		case <-ctx.Done():
		case <-changed:
		case <-again.C:
		}
		again.Stop()
	}
}

// round tries all pods that are due, and returns the time until the next round. It begins
// with the newest pod, which is being started.
func (p *prefetcher) round(ctx context.Context) time.Duration {
	if p.pods.problem() != nil {
		return prefetchFirst // the API server is away
	}
	open := p.pods.choose(known.incomplete)
	if len(open) == 0 {
		return prefetchLast
	}
	var group errgroup.Group
	group.SetLimit(prefetchAtOnce)
	for _, k := range slices.Backward(open) {
		if p.tried.recentError(k.pod.uid) != nil {
			continue
		}
		group.Go(func() error {
			switch {
			case p.rate.Wait(ctx) != nil:
			case len(p.resolver.learn(ctx, k)) > 0:
				p.tried.note(k.pod.uid, errIncomplete)
			default:
				p.tried.note(k.pod.uid, nil)
			}
			return nil
		})
	}
	_ = group.Wait() // no part of it gives an error
	return prefetchFirst
}
