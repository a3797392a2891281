package registry

import (
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

// party is one that starts, is restarted and is killed.
type party struct {
	start, restart func()
	kill           func() // nil where a restart leaves no more behind than a kill
}

// parties are the driver, its registrar, crust-proxy and kubelet, not started yet.
// A crust-proxy that is stopped leaves what one that is killed does: its sockets.
func (w *world) parties() map[string]party {
	d := w.driver(name, "driver.sock")
	r := w.registrar(d)
	start := func(begin func() error) func() { return func() { check.Must(w.t, begin()) } }
	both := func() { start(d.Start)(); start(r.Start)() }
	return map[string]party{
		"driver":    {start(d.Start), func() { d.Kill(); start(d.Start)() }, nil},
		"registrar": {start(r.Start), func() { check.Must(w.t, r.Stop()); start(r.Start)() }, r.Kill},
		"pod":       {both, func() { check.Must(w.t, r.Stop()); d.Kill(); both() }, func() { r.Kill(); d.Kill() }},
		"crust":     {w.startRegistry, func() { w.stop(); w.startRegistry() }, nil},
		"kubelet":   {w.startKubelet, func() { w.kubelet.Stop(); w.startKubelet() }, nil},
	}
}

// ends tells whether a party is to be ended in a way.
func ends(who, how string) bool { return how == "restart" || who == "registrar" || who == "pod" }

// startOrders are all orders of the four.
func startOrders(of []string) (out [][]string) {
	if len(of) == 0 {
		return [][]string{nil}
	}
	for i := range of {
		rest := append(append([]string{}, of[:i]...), of[i+1:]...)
		for _, order := range startOrders(rest) {
			out = append(out, append([]string{of[i]}, order...))
		}
	}
	return out
}

func TestEveryStartOrder(t *testing.T) {
	for _, order := range startOrders([]string{"driver", "registrar", "crust", "kubelet"}) {
		t.Run(strings.Join(order, "-"), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			parties := w.parties()
			for _, one := range order {
				parties[one].start()
			}
			w.served("driver.sock")
			w.neverRefused()
			w.steady()
		})
	}
}

// registersAgain waits until kubelet has heard of a restart. One of the driver
// alone does not concern it.
func (w *world) registersAgain(who string, before int) {
	w.t.Helper()
	switch who {
	case "driver":
		return
	case "kubelet":
		before = 0
	}
	check.Eventually(w.t, "another registration", func() bool { return w.kubelet.Count(kubelet.Registered) > before })
}

func again(p party, how string) {
	if how == "restart" {
		p.restart()
		return
	}
	p.kill()
	p.start()
}

// TestRestartWhileServing does it with all of them up.
func TestRestartWhileServing(t *testing.T) {
	for _, who := range []string{"driver", "registrar", "pod", "crust", "kubelet"} {
		for _, how := range []string{"restart", "kill"} {
			if !ends(who, how) {
				continue
			}
			t.Run(how+"-"+who, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				parties := w.parties()
				for _, one := range []string{"pod", "crust", "kubelet"} {
					parties[one].start()
				}
				for range 3 {
					w.served("driver.sock")
					before := w.kubelet.Count(kubelet.Registered)
					again(parties[who], how)
					w.registersAgain(who, before)
				}
				w.served("driver.sock")
				w.neverRefused()
				w.steady()
			})
		}
	}
}

func TestRegistrarThatGoesIsDeregisteredAndComesBack(t *testing.T) {
	t.Parallel()
	w := running(t)
	_, r := w.pair()
	w.served("driver.sock")
	check.Must(t, r.Stop())
	check.Eventually(t, "kubelet forgets the driver", func() bool { return w.kubelet.Endpoint(name) == "" })
	if !exists(w.csi()) || exists(w.offered()) {
		t.Error("the CSI socket should stay, and the registration go")
	}
	check.Must(t, r.Start())
	w.served("driver.sock")
	w.neverRefused()
	if w.kubelet.Count(kubelet.Deregistered) != 1 {
		t.Errorf("events: %+v", w.kubelet.Events())
	}
}
