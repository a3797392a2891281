package registry

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

// checked is a world whose CSINode is looked at, with a driver that kubelet has
// registered. It counts the looks, which find no driver while empty is set.
type checked struct {
	*world
	registrar       *kubelet.Registrar
	looks, renewals atomic.Int64
	empty           atomic.Bool
	shownMissing    atomic.Bool // at the last renewal
}

func newChecked(t *testing.T) *checked {
	t.Helper()
	t.Parallel()
	w := &checked{world: newWorld(t)}
	w.tells()
	w.startKubelet()
	w.renewed = func(string) {
		w.shownMissing.Store(w.missing())
		w.renewals.Add(1)
	}
	w.times.nodeCheck, w.times.nodeCheckSoon = 2*turn, turn
	cfg := w.config()
	cfg.CSINode = w
	w.startRegistryWith(cfg)
	_, w.registrar = w.pair()
	w.served("driver.sock")
	w.look(1) // it begins in step
	return w
}

// NodeDrivers reads the CSINode.
func (w *checked) NodeDrivers(context.Context) (map[string]bool, error) {
	defer w.looks.Add(1)
	return map[string]bool{name: w.kubelet.InNode(name) && !w.empty.Load()}, nil
}

// look waits for as many further looks, which are complete when the next one begins.
func (w *checked) look(n int64) {
	w.t.Helper()
	want := w.looks.Load() + n + 1
	check.Eventually(w.t, "the CSINode is looked at", func() bool { return w.looks.Load() >= want })
}

func (w *checked) missing() bool {
	one, _ := w.shown(name)
	return one.Missing
}

// TestDriverThatIsMissingInTheCSINodeIsRenewed: kubelet loses the driver long after it has confirmed the registration.
func TestDriverThatIsMissingInTheCSINodeIsRenewed(t *testing.T) {
	w := newChecked(t)
	check.Require(t, w.renewals.Load() == 0 && !w.missing(),
		"a driver that is there: %d renewals, shown as missing: %t", w.renewals.Load(), w.missing())
	w.kubelet.LoseFromNode(name)
	check.Eventually(t, "it is in the CSINode again", func() bool { return w.kubelet.InNode(name) })
	w.served("driver.sock")
	check.Eventually(t, "it is shown as missing no more", func() bool { return !w.missing() })
	w.steady()
	check.That(t, w.renewals.Load() >= 1 && w.shownMissing.Load(),
		"it was renewed %d times; it was shown as missing: %t", w.renewals.Load(), w.shownMissing.Load())
}

// TestNoRenewalOfAMissingDriverWhileAnotherSocketStands: kubelet could take that one.
func TestNoRenewalOfAMissingDriverWhileAnotherSocketStands(t *testing.T) {
	w := newChecked(t)
	d := w.driver(name, "other.sock")
	check.Must(t, d.Start())
	check.Must(t, w.direct(d, w.kubeletDir()).Start())
	check.Eventually(t, "the alarm", func() bool { return w.lastAlarm() == alarm{name, true} })
	w.empty.Store(true)
	check.Eventually(t, "it is shown as missing", w.missing)
	w.look(4)
	check.That(t, w.renewals.Load() == 0, "it was renewed %d times", w.renewals.Load())
}

// TestDriverThatIsLostOnItsWayPastUs: the driver moves to kubelet's directory, and the late removal of our registration
// takes its new one out of the CSINode. That socket is not ours to make anew.
func TestDriverThatIsLostOnItsWayPastUs(t *testing.T) {
	w := newChecked(t)
	check.Must(t, w.registrar.Stop())
	check.Eventually(t, "kubelet has forgotten ours", func() bool { return w.kubelet.Endpoint(name) == "" })
	d := w.driver(name, "other.sock")
	check.Must(t, d.Start())
	direct := w.direct(d, w.kubeletDir())
	check.Must(t, direct.Start())
	check.Eventually(t, "kubelet calls the driver itself", func() bool { return w.kubelet.Endpoint(name) == d.Socket })
	check.Eventually(t, "it is in the CSINode", func() bool { return w.kubelet.InNode(name) })
	w.kubelet.LoseFromNode(name) // now, and not when some time is over: on a busy machine that could be before
	lost := func() bool { return strings.Contains(w.registry.Bypassed()[name], "is not in the node's CSINode") }
	check.Eventually(t, "that is reported", lost)
	check.That(t, exists(direct.Socket()) && w.renewals.Load() == 0, "a registration that is not ours was renewed")
	check.Must(t, direct.Stop())
	check.Must(t, direct.Start())
	check.Eventually(t, "it is in the CSINode again", func() bool { return w.kubelet.InNode(name) })
	check.Eventually(t, "that is not reported any more", func() bool { return w.registry.Bypassed()[name] != "" && !lost() })
}

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
		check.That(t, !w.look(false, nil) && !w.missing(name), "%s: one look was enough", what)
		between(w)
		check.That(t, !w.look(false, nil), "%s: it is renewed", what)
		check.That(t, w.look(false, nil) && w.missing(name), "%s: it is not renewed after two looks", what)
		w.look(false, errors.New("the API server is away"))
		check.That(t, w.missing(name), "%s: it is not shown as missing any more, because one look failed", what)
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
			check.That(t, slices.Equal(waits, []time.Duration{0, 1, 2, 4, 8, 16, 30, 30, 30, 30}), "%s: renewed after %d minutes", what, waits)
		})
	}
}
