package registry

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// NotInNode completes "driver X is": the finding about a driver whose State is Missing.
const NotInNode = "registered with kubelet and not in the node's CSINode: pods with its volumes are not scheduled to this node; " +
	"crust-proxy renews the registration"

// nodeCheck compares the drivers that kubelet has registered through us with those in
// the node's CSINode, and renews the registration of one that is missing there. It
// finds what settling misses: a removal that takes kubelet longer. A driver that has moved
// to kubelet's directory can be lost in the same way: that is only reported.
type nodeCheck struct {
	registry *Registry
	soon     chan struct{} // a driver was registered

	mu     sync.Mutex
	absent absences
	known  bool // the last check could read the CSINode
}

// checkSoon must be called when kubelet has registered a driver.
func (c *nodeCheck) checkSoon() {
	select {
	case c.soon <- struct{}{}:
	default: // a check is pending already
	}
}

// missing reports whether a driver is known to be missing in the CSINode.
func (c *nodeCheck) missing(driver string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	one := c.absent[driver]
	return c.known && one != nil && one.missing
}

// run checks until ctx ends.
func (c *nodeCheck) run(ctx context.Context) {
	for again := false; ctx.Err() == nil; {
		c.pause(ctx, again)
		again = c.check(ctx)
	}
}

// pause waits until the next check: a short time after a registration and after the first
// check that missed a driver, else a long one. Either is up to a fifth longer or shorter, so
// that not all nodes of a cluster ask at once.
func (c *nodeCheck) pause(ctx context.Context, again bool) {
	times := c.registry.times
	if !again {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait.Jitter(times.NodeCheck*4/5, 0.5)):
			return
		case <-c.soon:
		}
	}
	sys.Sleep(ctx, wait.Jitter(times.NodeCheckSoon*4/5, 0.5))
}

// check reads the CSINode once. It reports whether the next check must come soon. The
// registrations are listed first: a later one need not be in what is read.
func (c *nodeCheck) check(ctx context.Context) (again bool) {
	registrations := c.registrations()
	ctx, cancel := context.WithTimeout(ctx, c.registry.times.Call)
	defer cancel()
	drivers, err := c.registry.cfg.NodeDrivers(ctx)
	due, again := c.compare(registrations, drivers, err == nil)
	for _, driver := range due {
		if c.renew(driver, registrations[driver]) {
			c.mu.Lock()
			c.absent.renewed(driver, time.Now(), c.registry.times)
			c.mu.Unlock()
		}
	}
	return again
}

// compare notes which of the registered drivers are in the CSINode, if that could be read
// (NodeDrivers logs its errors). It returns the drivers whose registration must be renewed
// now.
func (c *nodeCheck) compare(registrations map[string]time.Time, drivers map[string]bool, known bool) (due []string, again bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.known = known; !known {
		c.absent.unknown()
		return nil, false
	}
	now := time.Now()
	for driver, at := range registrations {
		once, changed := c.absent.note(driver, at, drivers[driver])
		again = again || once
		switch log := c.registry.cfg.Log.With(zap.String("driver", driver)); {
		case changed && drivers[driver]:
			log.Info("a driver is in the node's CSINode again")
		case changed:
			log.Error("a driver has registered with kubelet and is not in the node's CSINode: pods with its volumes are not scheduled to this node")
		}
		if c.absent.due(driver, now) {
			due = append(due, driver)
		}
	}
	c.absent.prune(registrations, now)
	return due, again
}

// registrations returns when kubelet registered each driver through us, and when each driver
// that had its CSI socket here registered directly.
func (c *nodeCheck) registrations() map[string]time.Time {
	c.registry.mu.Lock()
	defer c.registry.mu.Unlock()
	out := make(map[string]time.Time)
	for _, one := range c.registry.direct {
		if c.registry.served[one.driver] != nil {
			out[one.driver] = one.since
		}
	}
	for name, one := range c.registry.names {
		if at := one.confirmed.Load(); at != nil {
			out[name] = *at
		}
	}
	return out
}

// renew has the driver's session renew its registration, if that is still the one that was
// checked.
func (c *nodeCheck) renew(driver string, at time.Time) bool {
	c.registry.mu.Lock()
	one := c.registry.names[driver]
	c.registry.mu.Unlock()
	if one == nil {
		return false
	}
	if now := one.confirmed.Load(); now == nil || !now.Equal(at) || !beginRenewal(c.registry, driver) {
		return false
	}
	one.registerAgain()
	return true
}
