package registry

import (
	"cmp"
	"time"
)

// Times are the waits of a Registry.
type Times struct {
	// Rescan bounds what a lost event costs.
	Rescan time.Duration
	// Call bounds each call to a registrar or driver.
	Call time.Duration
	// FirstRetry doubles with each attempt, up to LastRetry.
	FirstRetry, LastRetry time.Duration
	// Untold is how long a driver may take to come up before its registrar is told
	// that it does not, and starts anew where people see it.
	Untold time.Duration
	// Away is how long a registration socket stays away, so that kubelet, whose
	// loop takes a second, forgets the old one before the new one comes: it
	// refuses an equal version under one name.
	Away time.Duration
	// Silence is how long kubelet may say nothing before the socket is made anew: it
	// may have given up, or its word may be lost. It is longer than kubelet's own
	// patience with a driver, which is two minutes.
	Silence time.Duration
	// LastRefusal bounds the wait after kubelet refused again and again.
	LastRefusal time.Duration
	// Settle is how long after a registration that may be lost again it is renewed,
	// and Unsettled how long after another socket of the driver went a registration
	// is such a one; see settling.
	Settle, Unsettled time.Duration
	// NodeCheck is between two looks at the node's CSINode, and NodeCheckSoon how
	// long after a registration, or after the first look that missed a driver, the
	// next one comes.
	NodeCheck, NodeCheckSoon time.Duration
	// LastRenewal bounds the wait after a driver was renewed that stays missing in the
	// CSINode. It begins with NodeCheck, and doubles.
	LastRenewal time.Duration
}

func (t Times) orUsual() Times {
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
