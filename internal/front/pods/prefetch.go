package pods

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"k8s.io/client-go/util/flowcontrol"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Prefetching is slow: when a daemon is updated on every node at once, the API server must
// not feel it. A lookup does not wait for it.
const (
	prefetchAtOnce = 4
	prefetchRate   = 5 // pods a second
	prefetchBurst  = 4
	prefetchSpread = 10 * time.Second // of the starts of all nodes' daemons
	// A claim that is not bound may never be bound.
	prefetchFirst = time.Second
	prefetchLast  = 5 * time.Minute
	prefetchSlow  = 8 * time.Second // the delay from which on it is a finding
)

// prefetcher learns the sources of new pods' volumes before they are looked up, so that they
// are known when the API server is away.
type prefetcher struct {
	pods     *pods
	resolver *resolver
	rate     flowcontrol.RateLimiter
	spread   time.Duration
	tried    retries // by the pod's uid
}

// run learns until ctx ends.
func (p *prefetcher) run(ctx context.Context) {
	sys.Sleep(ctx, rand.N(p.spread+1)) // #nosec G404 -- no secret
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
	sys.Each(prefetchAtOnce, slices.Backward(open), func(_ int, k known) {
		if p.tried.recentError(k.pod.uid) == nil && p.rate.Wait(ctx) == nil {
			p.tried.note(k.pod.uid, firstError(p.resolver.learn(ctx, k)))
		}
	})
	return prefetchFirst
}

// problems says of the first of some incomplete pods why a volume of them is not known although it was asked for several times.
func (p *prefetcher) problems(open []known) (out []string) {
	for _, k := range open {
		if err := p.tried.recentError(k.pod.uid); err != nil && p.tried.delays.Get(k.pod.uid) >= prefetchSlow && len(out) < 3 {
			out = append(out, fmt.Sprintf("pod %s: %v", k.pod, err))
		}
	}
	return out
}

func firstError(failed map[string]error) error {
	if len(failed) == 0 {
		return nil
	}
	return failed[slices.Min(slices.Collect(maps.Keys(failed)))]
}
