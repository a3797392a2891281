package registry

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
)

// watched is what the checks of the CSINode know of one driver.
type watched struct {
	*nodeCheck
	registration time.Time // zero while its registrar is away
}

func newWatched() *watched {
	times := times{nodeCheck: time.Minute, lastRenewal: 30 * time.Minute}
	return &watched{newRegistry(Config{Log: zap.NewNop()}, times).node, time.Now()}
}

// look notes one look, and reports a renewal, after which there is a new registration.
func (w *watched) look(present bool, err error) bool {
	registrations := make(map[string]time.Time)
	if !w.registration.IsZero() {
		registrations[name] = w.registration
	}
	due, _ := w.compare(registrations, map[string]bool{name: present}, err == nil)
	if len(due) == 0 {
		return false
	}
	w.renewals.Next(name, time.Now())
	w.registration = time.Now()
	return true
}

// TestOneLookProvesNothing: two in a row do, of the same registration.
func TestOneLookProvesNothing(t *testing.T) {
	for what, between := range map[string]func(*watched){
		"it was seen in between":       func(w *watched) { w.look(true, nil) },
		"it was unknown in between":    func(w *watched) { w.look(false, errors.New("the API server is away")) },
		"it was registered in between": func(w *watched) { w.registration = w.registration.Add(time.Second) },
		"its registrar was away in between": func(w *watched) {
			at := w.registration
			w.registration = time.Time{}
			w.look(false, nil)
			w.registration = at
		},
	} {
		w := newWatched()
		if w.look(false, nil) || w.missing(name) {
			t.Errorf("%s: one look was enough", what)
		}
		between(w)
		if w.look(false, nil) {
			t.Errorf("%s: it is renewed", what)
		}
		if !w.look(false, nil) || !w.missing(name) {
			t.Errorf("%s: it is not renewed after two looks", what)
		}
		if w.look(false, errors.New("the API server is away")); w.missing(name) {
			t.Errorf("%s: it is shown as missing while that is not known", what)
		}
	}
}

// TestRenewalsOfAMissingDriverBackOff, whether it stays missing or comes and goes.
func TestRenewalsOfAMissingDriverBackOff(t *testing.T) {
	for what, seen := range map[string]bool{"stays missing": false, "comes and goes": true} {
		synctest.Test(t, func(t *testing.T) {
			w := newWatched()
			var waits []time.Duration
			last := time.Now()
			for range 3 * 60 * 12 {
				if seen && w.registration.Equal(time.Now().Add(-5*time.Second)) {
					w.look(true, nil)
				}
				if w.look(false, nil) {
					waits = append(waits, time.Since(last).Round(time.Minute)/time.Minute)
					last = time.Now()
				}
				time.Sleep(5 * time.Second)
			}
			if want := []time.Duration{0, 1, 2, 4, 8, 16, 30, 30, 30, 30}; !slices.Equal(waits, want) {
				t.Errorf("%s: renewed after %d minutes", what, waits)
			}
		})
	}
}
