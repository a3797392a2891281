package registry

import "time"

// missesToRenew is how many checks in a row must miss a driver in the CSINode before its
// registration is renewed.
const missesToRenew = 2

// absence is a driver that was missing in the CSINode.
type absence struct {
	registration time.Time // the one that was checked
	misses       int       // how many checks in a row missed it
	missing      bool      // stays set during renewals, until the driver is in the CSINode
	next         time.Time // no renewal before
	wait         time.Duration
}

// absences are the drivers that were missing, and those that were renewed lately.
type absences map[string]*absence

// note records whether a driver that kubelet has registered is in the CSINode. It reports
// whether the next check decides, and whether the driver began or ceased to be missing.
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
		one.misses, one.missing = 0, false
		return false, was
	}
	if !one.registration.Equal(registration) {
		one.registration, one.misses = registration, 0
	}
	one.misses++
	one.missing = was || one.misses >= missesToRenew
	return one.misses < missesToRenew, one.missing != was
}

// due reports whether a driver's registration must be renewed now.
func (a absences) due(driver string, now time.Time) bool {
	one := a[driver]
	return one != nil && one.misses >= missesToRenew && !now.Before(one.next)
}

// renewed delays the next renewal, twice as long each time.
func (a absences) renewed(driver string, now time.Time, times Times) {
	one := a[driver]
	one.wait = min(max(2*one.wait, times.NodeCheck), times.LastRenewal)
	one.misses, one.next = 0, now.Add(one.wait)
}

// unknown restarts all counts: a check that could not read the CSINode proves nothing.
func (a absences) unknown() {
	for _, one := range a {
		one.misses = 0
	}
}

// prune removes the drivers that are not missing any more, but not before their wait is
// over: a driver that is lost again and again is not renewed more often because it is there
// in between.
func (a absences) prune(registered map[string]time.Time, now time.Time) {
	for driver, one := range a {
		_, there := registered[driver]
		if gone := !there || one.misses == 0 && !one.missing; gone && !now.Before(one.next) {
			delete(a, driver)
		}
	}
}
