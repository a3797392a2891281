package crust

import (
	"context"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/projection"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// maxJobs bounds the queue of jobs. The reconciler finds again what did not fit.
	maxJobs = 4096
	// cleaners is how many jobs are done at once: one takes long if its sandbox hangs.
	cleaners = 8
	// lockTime bounds the wait for a handler that changes the directory.
	lockTime = 2 * time.Second
	// verifyTime bounds the check whether a sandbox lives.
	verifyTime = 3 * time.Second
)

// job is work for Run: to remove the files of the sandbox that is gone or, if that is "", to
// check whether the volume's sandbox still lives.
type job struct {
	key  volume.Key
	gone string
}

type cleaner struct {
	bindings *bindings
	log      *zap.Logger
	// inUse is Handler.InUse.
	inUse func(context.Context, *volume.Volume) (string, error)
	jobs  chan job
}

func (c *cleaner) enqueue(j job) {
	select {
	case c.jobs <- j:
	default:
	}
}

func (c *cleaner) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case j := <-c.jobs:
			c.do(ctx, j)
		}
	}
}

func (c *cleaner) do(ctx context.Context, j job) {
	e, tracked := c.bindings.table.Get(j.key)
	if !tracked {
		return
	}
	if j.gone != "" {
		c.clearThose(e.Volume, func(ids []string) []string {
			return slices.DeleteFunc(ids, func(id string) bool { return id != j.gone })
		})
		return
	}
	// If no sandbox lives, this already removes the files of the dead ones.
	live, err := c.inUse(ctx, e.Volume)
	if err != nil {
		c.log.Debug("a volume's sandbox cannot be asked", zap.String("target", e.Volume.Target), zap.Error(err))
	}
	if live == "" {
		return
	}
	c.clearThose(e.Volume, func(ids []string) []string {
		at := slices.Index(ids, live)
		if at < 0 {
			return nil
		}
		// Those that are older than the living one would be known if they lived. A newer one may not be known yet.
		return slices.DeleteFunc(ids[at+1:], func(id string) bool { return !c.bindings.isGone(id) })
	})
}

// clearThose removes the files of the sandboxes that dead selects of all, the newest first.
func (c *cleaner) clearThose(v *volume.Volume, dead func(ids []string) []string) {
	seen, err := c.bindings.readDir(v)
	if err != nil {
		c.log.Warn("dead sandboxes cannot be cleared away", zap.String("target", v.Target), zap.Error(err))
		return
	}
	seen.ids = dead(seen.ids)
	if len(seen.ids) > 0 {
		c.clear(v, seen)
	}
}

// suspect lets Run check a volume with a sandbox that the container runtime does not know, or if none is followed.
func (c *cleaner) suspect(v *volume.Volume) {
	ids, _ := c.bindings.layout.Sandboxes(string(v.Key))
	if slices.ContainsFunc(ids, func(id string) bool { return c.bindings.sandboxes == nil || c.bindings.isGone(id) }) {
		c.enqueue(job{key: v.Key})
	}
}

// clear removes the files of dead sandboxes unless they changed since they were seen and,
// with the last of them, runtime-cli and runtime-socket. It reports whether another sandbox
// is left. It changes nothing of what another broker published.
func (c *cleaner) clear(v *volume.Volume, seen *dirSnapshot) (another bool) {
	if whose, _, err := c.bindings.layout.tree.OwnerOf(string(v.Key)); err != nil || whose != projection.OwnedByUs {
		c.bindings.table.Unbind(v.Key, seen.bound)
		return false
	}
	dir, err := abi.Open(c.bindings.layout.tree.Root, string(v.Key))
	if err != nil {
		return false
	}
	defer func() { _ = dir.Close() }()
	if err := dir.Lock(lockTime); err != nil {
		c.log.Warn("dead sandboxes cannot be cleared away", zap.String("target", v.Target), zap.Error(err))
		return false
	}
	left, err := c.clearLocked(v, dir, seen)
	if err != nil {
		c.log.Warn("dead sandboxes cannot be cleared away", zap.String("target", v.Target), zap.Error(err))
	}
	if len(left) == 0 {
		c.bindings.table.Unbind(v.Key, seen.bound)
		return false
	}
	c.bindings.seen(v.Key, left[0])
	return true
}

// clearLocked keeps the files that a sandbox wrote since.
func (c *cleaner) clearLocked(v *volume.Volume, dir *abi.Dir, seen *dirSnapshot) (left []string, err error) {
	for _, id := range seen.ids {
		if now, there := c.bindings.layout.identify(v.Key, id); there && now == seen.files[id] {
			if err := dir.Remove(id); err != nil {
				return nil, err
			}
		}
	}
	left, err = dir.Sandboxes()
	if err != nil || len(left) > 0 {
		return left, err
	}
	for _, name := range []string{abi.CLIName, abi.SocketName} {
		if err := dir.Remove(name); err != nil {
			return nil, err
		}
	}
	return nil, nil
}
