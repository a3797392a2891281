package registry

import (
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

// parties are the driver, its registrar, crust-proxy and kubelet, not started yet: how each is started, and how it is
// restarted. A crust-proxy that is stopped leaves what one that is killed does: its sockets.
func (w *world) parties() (start, restart map[string]func()) {
	d := w.driver(name, "driver.sock")
	r := w.registrar(d)
	driver, registrar := func() { check.Must(w.t, d.Start()) }, func() { check.Must(w.t, r.Start()) }
	stop := func() { check.Must(w.t, r.Stop()) }
	return map[string]func(){"driver": driver, "registrar": registrar, "crust": w.startRegistry, "kubelet": w.startKubelet},
		map[string]func(){
			"driver":             func() { d.Kill(); driver() },
			"registrar":          func() { stop(); registrar() },
			"killed registrar":   func() { r.Kill(); registrar() },
			"pod of both":        func() { stop(); d.Kill(); driver(); registrar() },
			"killed pod of both": func() { r.Kill(); d.Kill(); driver(); registrar() },
			"crust":              func() { w.stop(); w.startRegistry() },
			"kubelet":            func() { w.kubelet.Stop(); w.startKubelet() },
		}
}

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
			start, _ := w.parties()
			for _, one := range order {
				start[one]()
			}
			w.served("driver.sock")
			w.neverRefused()
			w.steady()
		})
	}
}

// registersAgain waits until kubelet has heard of a restart. One of the driver alone does not concern it.
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

// TestRestartWhileServing does it with all of them up.
func TestRestartWhileServing(t *testing.T) {
	for _, who := range []string{"driver", "registrar", "killed registrar", "pod of both", "killed pod of both", "crust", "kubelet"} {
		t.Run(who, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			start, restart := w.parties()
			for _, one := range []string{"driver", "registrar", "crust", "kubelet"} {
				start[one]()
			}
			for range 3 {
				w.served("driver.sock")
				before := w.kubelet.Count(kubelet.Registered)
				restart[who]()
				w.registersAgain(who, before)
			}
			w.served("driver.sock")
			w.neverRefused()
			w.steady()
		})
	}
}

func TestRegistrarThatGoesIsDeregisteredAndComesBack(t *testing.T) {
	w, _, r := runningPair(t)
	check.Must(t, r.Stop())
	check.Eventually(t, "kubelet forgets the driver", func() bool { return w.kubelet.Endpoint(name) == "" })
	check.That(t, exists(w.csi()) && !exists(w.offered()), "the CSI socket should stay, and the registration go")
	check.Must(t, r.Start())
	w.served("driver.sock")
	w.neverRefused()
	check.That(t, w.kubelet.Count(kubelet.Deregistered) == 1, "events: %+v", w.kubelet.Events())
}
