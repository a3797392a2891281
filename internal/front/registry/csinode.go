package registry

import (
	"context"
	"maps"
	"sync"
	"time"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// NotInNode completes "driver X is": the finding about a driver whose State is Missing.
const NotInNode = "registered with kubelet and not in the node's CSINode: pods with its volumes are not scheduled to this node; " +
	"crust-proxy renews the registration"

// missesToRenew is how many checks in a row must miss a driver in the CSINode before its registration is renewed.
const missesToRenew = 2

type absence struct {
	registration time.Time // the one that was checked
	misses       int       // how many checks in a row missed it
	missing      bool      // stays set during renewals, until the driver is in the CSINode
}

// nodeCheck compares the drivers that kubelet has registered through us with those in the node's CSINode, and renews
// the registration of one that is missing there. It finds what settling misses: a removal that takes kubelet longer. A
// driver that has moved to kubelet's directory can be lost in the same way: that is only reported.
type nodeCheck struct {
	registry *Registry
	soon     chan struct{} // kubelet has registered a driver

	// renewals delays the renewals of a driver, also of one that is lost again and again.
	renewals *flowcontrol.Backoff

	mu     sync.Mutex
	absent map[string]*absence // as of the last check that could read the CSINode
}

func (c *nodeCheck) missing(driver string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	one := c.absent[driver]
	return one != nil && one.missing
}

func (c *nodeCheck) run(ctx context.Context) {
	for again := false; ctx.Err() == nil; {
		c.pause(ctx, again)
		again = c.check(ctx)
	}
}

// pause waits until the next check: a short time after a registration and after the first check that missed a driver,
// else a long one. Either is up to a fifth longer or shorter, so that not all nodes of a cluster ask at once.
func (c *nodeCheck) pause(ctx context.Context, again bool) {
	times := c.registry.times
	if !again {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait.Jitter(times.nodeCheck*4/5, 0.5)):
			return
		case <-c.soon:
		}
	}
	sys.Sleep(ctx, wait.Jitter(times.nodeCheckSoon*4/5, 0.5))
}

// check reads the CSINode once. It reports whether the next check must come soon. The
// registrations are listed first: a later one need not be in what is read.
func (c *nodeCheck) check(ctx context.Context) (again bool) {
	registrations := c.registrations()
	ctx, cancel := context.WithTimeout(ctx, c.registry.times.call)
	defer cancel()
	drivers, err := c.registry.cfg.CSINode.NodeDrivers(ctx) // it logs its errors
	due, again := c.compare(registrations, drivers, err == nil)
	for _, driver := range due {
		if c.renew(driver, registrations[driver]) {
			c.renewals.Next(driver, time.Now())
		}
	}
	return again
}

// compare notes which of the registered drivers are in the CSINode, if that could be read; else all counts begin again.
// It returns the drivers whose registration must be renewed now, and whether the next check decides about one.
func (c *nodeCheck) compare(registrations map[string]time.Time, drivers map[string]bool, known bool) (due []string, again bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !known {
		for _, one := range c.absent {
			one.misses = 0
		}
		return nil, false
	}
	now := time.Now()
	maps.DeleteFunc(c.absent, func(driver string, _ *absence) bool { // one that is being renewed stays
		return registrations[driver].IsZero() && !c.renewals.IsInBackOffSinceUpdate(driver, now)
	})
	for driver, at := range registrations {
		if drivers[driver] {
			if one := c.absent[driver]; one != nil && one.missing {
				c.registry.cfg.Log.Info("a driver is in the node's CSINode again", zap.String("driver", driver))
			}
			delete(c.absent, driver)
			continue
		}
		misses := c.missed(driver, at)
		again = again || misses < missesToRenew
		if misses >= missesToRenew && !c.renewals.IsInBackOffSinceUpdate(driver, now) {
			due = append(due, driver)
		}
	}
	c.renewals.GC()
	return due, again
}

// missed notes that a driver is not in the CSINode, and returns how many checks in a row have
// missed this registration of it. The caller holds the lock.
func (c *nodeCheck) missed(driver string, registration time.Time) int {
	one := c.absent[driver]
	if one == nil {
		one = &absence{}
		c.absent[driver] = one
	}
	if !one.registration.Equal(registration) {
		one.registration, one.misses = registration, 0
	}
	one.misses++
	if one.misses >= missesToRenew && !one.missing {
		one.missing = true
		c.registry.cfg.Log.Error("a driver has registered with kubelet and is not in the node's CSINode: pods with its volumes are not "+
			"scheduled to this node", zap.String("driver", driver))
	}
	return one.misses
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

// renew has the driver's session renew its registration, if that is still the one that was checked.
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
