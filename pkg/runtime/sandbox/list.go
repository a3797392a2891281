package sandbox

import (
	"context"
	"fmt"
	"sync"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	"golang.org/x/sync/errgroup"
)

const (
	// listTime bounds a whole listing.
	listTime = 30 * time.Second
	// stateTime bounds the question after one task. Containerd itself gives a
	// shim two seconds.
	stateTime = 5 * time.Second
	// stateAtOnce is how many tasks are asked after at once: shims that hang must
	// not make a listing last for ever.
	stateAtOnce = 16
)

// listing is the sandboxes that lived at some moment.
type listing struct {
	live map[string]sandbox
	err  error
}

// startListing lists beside the loop. It is false where a listing is under way.
func (f *follower) startListing(ctx context.Context) bool {
	if f.touched != nil {
		return false
	}
	f.touched = make(map[string]bool)
	f.beside.Go(func() {
		live, err := f.t.list(ctx, f.c)
		f.listed <- listing{live: live, err: err}
		if err == nil && !f.warned.Load() {
			f.warnOfOthers(ctx)
		}
	})
	return true
}

// endListing makes the listing true, but for what events told since it began.
func (f *follower) endListing(l listing) error {
	touched := f.touched
	f.touched = nil
	if l.err != nil {
		return l.err
	}
	for _, id := range f.t.ids() {
		if _, lives := l.live[id]; !lives && !touched[id] {
			f.t.remove(id)
		}
	}
	for id, s := range l.live {
		if !touched[id] {
			f.t.add(s)
		}
	}
	f.t.setCurrent(f.c)
	f.t.found()
	return nil
}

// list asks containerd for the live sandboxes. Their tasks are asked after one
// by one and not through the list of all tasks, for which containerd waits for
// every shim in turn: one sandbox that hangs would hold up all of it.
func (t *Tracker) list(ctx context.Context, c *client) (map[string]sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	var all []sandbox
	err := c.each(ctx, fmt.Sprintf("labels.%q==%s", kindLabel, kindSandbox), func(container *containersapi.Container) {
		if s, ok := t.sandboxOf(container); ok {
			all = append(all, s)
		}
	})
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	live := make(map[string]sandbox, len(all))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(stateAtOnce)
	for _, s := range all {
		group.Go(func() error {
			runs, err := c.runs(ctx, s.id)
			if runs {
				mu.Lock()
				defer mu.Unlock()
				live[s.id] = s
			}
			return err
		})
	}
	return live, group.Wait()
}
