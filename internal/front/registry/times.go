package registry

import (
	"cmp"
	"time"
)

// Times are the waits of a Registry.
type Times struct {
	// Rescan is the longest time between two scans, for events that were lost.
	Rescan time.Duration
	// Call bounds each call to a registrar or driver.
	Call time.Duration
	// FirstRetry doubles with each attempt, up to LastRetry.
	FirstRetry, LastRetry time.Duration
	// Untold is how long a driver may take to come up before its registrar is notified. The
	// registrar then restarts, which people see.
	Untold time.Duration
	// Away is how long a registration socket stays away before it is made again. Meanwhile
	// kubelet, whose loop takes a second, forgets the old one; it refuses an equal version
	// under one name.
	Away time.Duration
	// Silence is how long kubelet may take to send a verdict before the socket is made
	// again: kubelet may have given up, or the verdict may be lost. It is longer than
	// kubelet's own timeout for a driver, which is two minutes.
	Silence time.Duration
	// LastRefusal bounds the wait after kubelet refused again and again.
	LastRefusal time.Duration
	// Settle is how long after a registration that kubelet may lose it is renewed.
	// Unsettled is how long after another socket of the driver has gone kubelet may lose a
	// registration; see settling.
	Settle, Unsettled time.Duration
	// NodeCheck is the time between two checks of the node's CSINode, and NodeCheckSoon the
	// time after a registration, or after the first check that missed a driver.
	NodeCheck, NodeCheckSoon time.Duration
	// LastRenewal bounds the wait between renewals of a driver that stays missing in the
	// CSINode. The wait begins with NodeCheck, and doubles.
	LastRenewal time.Duration
}

func (t Times) withDefaults() Times {
	return Times{
		Rescan:      cmp.Or(t.Rescan, time.Second),
		Call:        cmp.Or(t.Call, 10*time.Second),
		FirstRetry:  cmp.Or(t.FirstRetry, 100*time.Millisecond),
		LastRetry:   cmp.Or(t.LastRetry, 5*time.Second),
		Untold:      cmp.Or(t.Untold, time.Minute),
		Away:        cmp.Or(t.Away, 1500*time.Millisecond),
		Silence:     cmp.Or(t.Silence, 3*time.Minute),
		LastRefusal: cmp.Or(t.LastRefusal, 30*time.Second),
		Settle:      cmp.Or(t.Settle, 10*time.Second),
		Unsettled:   cmp.Or(t.Unsettled, time.Minute),

		NodeCheck:     cmp.Or(t.NodeCheck, time.Minute),
		NodeCheckSoon: cmp.Or(t.NodeCheckSoon, 5*time.Second),
		LastRenewal:   cmp.Or(t.LastRenewal, 30*time.Minute),
	}
}
