package registry

import (
	"slices"
	"testing"
	"time"
)

const lostDriver = "lost.example.com"

// watched is what is known of one driver, on a clock of its own.
type watched struct {
	absences
	now          time.Time
	registration time.Time
}

func newWatched() *watched {
	return &watched{absences: make(absences), now: time.Unix(1000, 0), registration: time.Unix(1, 0)}
}

// look notes one look, and reports a renewal, after which there is a new registration.
func (w *watched) look(present bool) bool {
	w.note(lostDriver, w.registration, present)
	due := w.due(lostDriver, w.now)
	if due {
		w.renewed(lostDriver, w.now, Times{NodeCheck: time.Minute, LastRenewal: 30 * time.Minute})
		w.registration = w.now
	}
	w.prune(map[string]time.Time{lostDriver: w.registration}, w.now)
	return due
}

// TestOneLookProvesNothing: two in a row do, of the same registration.
func TestOneLookProvesNothing(t *testing.T) {
	for what, between := range map[string]func(*watched){
		"it was seen in between":            func(w *watched) { w.look(true) },
		"it was unknown in between":         func(w *watched) { w.unknown() },
		"it was registered in between":      func(w *watched) { w.registration = w.now },
		"its registrar was away in between": func(w *watched) { w.prune(nil, w.now) },
	} {
		w := newWatched()
		if w.look(false); w.due(lostDriver, w.now) {
			t.Errorf("%s: one look was enough", what)
		}
		between(w)
		if w.look(false) {
			t.Errorf("%s: it is renewed", what)
		}
		if !w.look(false) {
			t.Errorf("%s: it is not renewed after two looks", what)
		}
	}
}

// TestRenewalsOfAMissingDriverBackOff, whether it stays missing or comes and goes.
func TestRenewalsOfAMissingDriverBackOff(t *testing.T) {
	for what, seen := range map[string]bool{"stays missing": false, "comes and goes": true} {
		w := newWatched()
		var waits []time.Duration
		last := w.now
		for range 3 * 60 * 12 {
			if seen && w.registration.Equal(w.now.Add(-5*time.Second)) {
				w.look(true)
			}
			if w.look(false) {
				waits = append(waits, w.now.Sub(last).Round(time.Minute))
				last = w.now
			}
			w.now = w.now.Add(5 * time.Second)
		}
		if want := []time.Duration{0, 1, 2, 4, 8, 16, 30, 30, 30, 30}; !slices.EqualFunc(waits, want, func(a, b time.Duration) bool { return a == b*time.Minute }) {
			t.Errorf("%s: renewed after %v", what, waits)
		}
	}
}

// TestOldAbsencesAreForgotten, so that a later loss is renewed at once.
func TestOldAbsencesAreForgotten(t *testing.T) {
	w := newWatched()
	w.look(false)
	if !w.look(false) {
		t.Fatal("it is not renewed")
	}
	w.look(true)
	if len(w.absences) != 1 {
		t.Error("the wait is forgotten too early")
	}
	w.now = w.now.Add(2 * time.Minute)
	if w.look(true); len(w.absences) != 0 {
		t.Errorf("%d are remembered", len(w.absences))
	}
}
