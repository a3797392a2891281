package registry

import "time"

// looksToBeSure is in how many looks in a row a driver must be missing in the CSINode
// before something is done.
const looksToBeSure = 2

// absence is a driver that was missing in the CSINode.
type absence struct {
	registration time.Time // the one that was looked at
	looks        int       // how often in a row that one was missing
	missing      bool      // holds during renewals, until the driver is seen
	next         time.Time // no renewal before
	wait         time.Duration
}

// absences are the drivers that were missing, and those that were renewed lately.
type absences map[string]*absence

// note takes down whether a driver that kubelet has registered was in the CSINode. It
// reports whether the next look decides, and whether the driver is missing since now, or
// not any more.
func (a absences) note(driver string, registration time.Time, present bool) (again, changed bool) {
	one := a[driver]
	if one == nil && present {
		return false, false
	}
	if one == nil {
		one = &absence{}
		a[driver] = one
	}
	was := one.missing
	if present {
		one.looks, one.missing = 0, false
		return false, was
	}
	if !one.registration.Equal(registration) {
		one.registration, one.looks = registration, 0
	}
	one.looks++
	one.missing = was || one.looks >= looksToBeSure
	return one.looks < looksToBeSure, one.missing != was
}

// due reports whether a driver's registration is to be renewed now.
func (a absences) due(driver string, now time.Time) bool {
	one := a[driver]
	return one != nil && one.looks >= looksToBeSure && !now.Before(one.next)
}

// renewed puts off the next renewal, each time twice as long.
func (a absences) renewed(driver string, now time.Time, times Times) {
	one := a[driver]
	one.wait = min(max(2*one.wait, times.NodeCheck), times.LastRenewal)
	one.looks, one.next = 0, now.Add(one.wait)
}

// unknown begins to count anew: looks that read nothing prove nothing.
func (a absences) unknown() {
	for _, one := range a {
		one.looks = 0
	}
}

// prune forgets the drivers that are not missing, after their wait: one that gets lost
// again and again is not renewed more often for being there in between.
func (a absences) prune(registered map[string]time.Time, now time.Time) {
	for driver, one := range a {
		_, there := registered[driver]
		if gone := !there || one.looks == 0 && !one.missing; gone && !now.Before(one.next) {
			delete(a, driver)
		}
	}
}
