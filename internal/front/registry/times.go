package registry

import "time"

// times are the waits of a Registry. Tests have shorter ones.
type times struct {
	// rescan is the time between two scans of directories that cannot be watched, and watched of
	// those that are. gather is the pause after a notice, in which more may follow.
	rescan, watched, gather time.Duration
	// call bounds each call to a registrar or driver, and nodeInfo the driver's NodeGetInfo: kubelet waits for as long.
	call, nodeInfo time.Duration
	// firstRetry doubles with each attempt, up to lastRetry.
	firstRetry, lastRetry time.Duration
	// untold is how long a driver may take to come up before its registrar is notified. The
	// registrar then restarts, which people see.
	untold time.Duration
	// away is the pause between two registrations. After a refusal the socket stays away for it, and
	// kubelet, whose loop takes a second, forgets it.
	away time.Duration
	// silence is how long kubelet may take to send a verdict before the socket is made again: kubelet may have given
	// up, or the verdict may be lost. It is longer than kubelet's own timeout for a driver, which is two minutes.
	silence time.Duration
	// lastRefusal bounds the wait after kubelet refused again and again.
	lastRefusal time.Duration
	// settle is how long after a registration that kubelet may lose it is renewed. unsettled is how long after another
	// socket of the driver has gone kubelet may lose a registration; see settling.
	settle, unsettled time.Duration
	// nodeCheck is the time between two checks of the node's CSINode, and nodeCheckSoon the
	// time after a registration, or after the first check that missed a driver.
	nodeCheck, nodeCheckSoon time.Duration
	// lastCalls is how long a call may take, when we end, that began while Patience was used up by another one.
	lastCalls time.Duration
	// lastRenewal bounds the wait between renewals of a driver that stays missing in the
	// CSINode. The wait begins with nodeCheck, and doubles.
	lastRenewal time.Duration
}

func defaultTimes() times {
	return times{
		rescan: time.Second, watched: 30 * time.Second, gather: 50 * time.Millisecond, call: 10 * time.Second, nodeInfo: 2 * time.Minute,
		firstRetry: 100 * time.Millisecond, lastRetry: 5 * time.Second,
		untold: time.Minute, away: 1500 * time.Millisecond, silence: 3 * time.Minute, lastRefusal: 30 * time.Second,
		settle: 10 * time.Second, unsettled: time.Minute,
		nodeCheck: time.Minute, nodeCheckSoon: 5 * time.Second, lastRenewal: 30 * time.Minute, lastCalls: time.Second,
	}
}
