package sandbox

import (
	"context"
	"fmt"
	"sync"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	sandboxapi "github.com/containerd/containerd/api/services/sandbox/v1"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"github.com/crust-proxy/crust-proxy/internal/sys"
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
		live, err := f.c.list(ctx)
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
	first := !f.answered
	f.answered = true
	f.s.conn.Store(f.c)
	f.t.replace(l.live, touched, first)
	return nil
}

// list asks containerd for the live sandboxes. Their tasks are asked after one
// by one and not through the list of all tasks, for which containerd waits for
// every shim in turn: one sandbox that hangs would hold up all of it.
func (c *client) list(ctx context.Context) (map[string]sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	var all []sandbox
	err := c.each(ctx, fmt.Sprintf("labels.%q==%s", kindLabel, kindSandbox), func(container *containersapi.Container) {
		if s, ok := c.t.sandboxOf(container); ok {
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

// podSandboxer is the controller whose sandboxes are containers. Versions that
// know no other do not name it.
const podSandboxer = "podsandbox"

// warnOfOthers says once when containerd has sandboxes without a container, which
// are not seen here: nobody should have to find out by missing them.
func (f *follower) warnOfOthers(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	name, err := f.c.otherSandboxer(ctx)
	if err != nil {
		f.t.log.Debug("containerd does not tell of its sandboxers", zap.Error(err))
		return
	}
	if name != "" && !f.warned.Swap(true) {
		f.t.log.Warn("containerd has sandboxes that are not containers, and they are not followed; "+
			"to follow all, set containerd.socket to \"\" and cri.socket to containerd's socket",
			zap.String("sandboxer", name), zap.String("runtime", f.t.party))
	}
}

// otherSandboxer names a controller, other than the usual one, that has a
// sandbox. Containerd 1.6 has no such list.
func (c *client) otherSandboxer(ctx context.Context) (string, error) {
	reply, err := c.sandboxes.List(c.in(ctx), &sandboxapi.StoreListRequest{})
	if err != nil {
		return "", fmt.Errorf("containerd: list sandboxes: %w", err)
	}
	for _, s := range reply.GetList() {
		if name := s.GetSandboxer(); name != "" && name != podSandboxer {
			return clip(name), nil
		}
	}
	return "", nil
}

// clip shortens what others wrote, for the log.
func clip(s string) string { return sys.ClipTo(s, 128) }
