package cluster

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/util/flowcontrol"
)

// What is asked ahead is asked slowly: a daemon that is updated on every node at
// once shall not be felt by the API server. A question does not wait for it.
const (
	aheadAtOnce = 4
	aheadRate   = 50 // pods a second
	aheadBurst  = 100
	// A claim that is not bound may never be.
	aheadFirst = time.Second
	aheadLast  = 5 * time.Minute
)

// ahead learns who gives the volumes of new pods before somebody asks, so that it
// is known when the API server is away.
type ahead struct {
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
func (a *ahead) run(ctx context.Context) {
	a.rate = flowcontrol.NewTokenBucketRateLimiter(aheadRate, aheadBurst)
	for ctx.Err() == nil {
		changed := a.c.news.wait()
		again := time.NewTimer(a.round(ctx))
		select {
		case <-ctx.Done():
		case <-changed:
		case <-again.C:
		}
		again.Stop()
	}
}

// round tries all pods that are due, and gives the time until the next one is.
func (a *ahead) round(ctx context.Context) time.Duration {
	if a.c.contact.problem(identity, allPods) != nil {
		return aheadFirst // nobody would answer
	}
	var group errgroup.Group
	group.SetLimit(aheadAtOnce)
	for _, k := range a.due() {
		group.Go(func() error {
			if a.rate.Wait(ctx) == nil {
				a.note(k.uid, len(a.c.learn(ctx, k)) == 0)
			}
			return nil
		})
	}
	_ = group.Wait() // no part of it gives an error
	return a.pause()
}

// due are the pods of which something is to be learned now.
func (a *ahead) due() []known {
	a.mu.Lock()
	defer a.mu.Unlock()
	open := a.c.pods.choose(func(k known) bool { return !k.ended && len(k.unlearned()) > 0 })
	kept := make(map[string]attempt, len(open))
	var due []known
	for _, k := range open {
		kept[k.uid] = a.tried[k.uid]
		if !kept[k.uid].next.After(time.Now()) {
			due = append(due, k)
		}
	}
	a.tried = kept // of those that are gone nothing is kept
	return due
}

func (a *ahead) note(uid string, done bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if done {
		delete(a.tried, uid)
		return
	}
	wait := min(max(2*a.tried[uid].wait, aheadFirst), aheadLast)
	a.tried[uid] = attempt{next: time.Now().Add(wait), wait: wait}
}

func (a *ahead) pause() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	pause := aheadLast
	for _, one := range a.tried {
		pause = min(pause, time.Until(one.next))
	}
	return max(pause, 0)
}
