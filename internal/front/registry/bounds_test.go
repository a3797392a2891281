package registry

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

// TestEndpointThatLeadsBack: a driver's endpoint that is a link to a socket of this
// very process is refused before a call goes round.
func TestEndpointThatLeadsBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.startKubelet()
	cfg := w.config()
	cfg.Self = os.Getpid() // which serves the drivers of these tests
	w.startRegistryWith(cfg)
	d := w.driver(name, "driver.sock")
	check.Must(t, d.Start())
	link := filepath.Join(w.dir, "link.sock")
	check.Must(t, os.Symlink(d.Socket, link))
	r := w.registrar(d)
	r.Endpoint = link
	check.Must(t, r.Start())
	check.Eventually(t, "the refusal", func() bool {
		one, there := w.shown(name)
		return there && !one.Ready && strings.Contains(one.Problem, link+" leads back to crust-proxy itself")
	})
	check.That(t, !exists(w.offered()), "it was offered to kubelet")
}

// TestAnswersAreBounded: a driver that reports more capabilities than are kept is not registered.
func TestAnswersAreBounded(t *testing.T) {
	for says, more := range map[string]int{"it reports 65 capabilities, and at most 64": 63, "larger than max": 64 << 10 / 4} {
		w := newWorld(t)
		w.startKubelet()
		w.startRegistry()
		d := w.driver(name, "driver.sock")
		d.More = make([]csi.NodeServiceCapability_RPC_Type, more)
		check.Must(t, d.Start())
		check.Must(t, w.registrar(d).Start())
		check.Eventually(t, says, func() bool {
			one, there := w.shown(name)
			return there && !one.Ready && strings.Contains(one.Problem, says)
		})
		w.nothingMade()
		w.stop()
	}
}

// ownContainer has each registrar run in a container of its own.
func ownContainer(_ context.Context, socket string) string { return socket }

// TestDriverNamesAreBounded: there is an end to the drivers that have a socket. One
// whose registrar has gone makes room, unless deferred volumes of it live here.
func TestDriverNamesAreBounded(t *testing.T) {
	w := newWorld(t)
	w.startKubelet()
	w.whose = ownContainer
	w.startRegistry()
	_, deferring := w.pair()
	w.served("driver.sock")
	w.setDeferred(true)
	start := func(n int) (string, *kubelet.Registrar) {
		d := w.driver(fmt.Sprintf("d%d.example.com", n), fmt.Sprintf("d%d.sock", n))
		check.Must(t, d.Start())
		r := w.registrar(d)
		check.Must(t, r.Start())
		return d.Name, r
	}
	registered := func(driver string) func() bool {
		return func() bool { return w.kubelet.Endpoint(driver) != "" }
	}
	names, registrars := make([]string, 63), make([]*kubelet.Registrar, 63)
	for n := range names { // one after the other: kubelet does not repeat what took it too long
		names[n], registrars[n] = start(n)
		check.Eventually(t, names[n]+" is registered", registered(names[n]))
	}
	check.Must(t, deferring.Stop())
	last, r := start(63)
	check.Eventually(t, "the refusal", func() bool {
		verdicts := r.Verdicts()
		return len(verdicts) > 0 && strings.Contains(verdicts[0].Error, "64 drivers already")
	})
	check.Must(t, registrars[0].Stop())
	check.Eventually(t, last+" is registered in its place", registered(last))
	left := check.Value(os.ReadDir(w.sockets()))(t)
	check.That(t, len(left) == 64 && exists(w.csi()) && !exists(filepath.Join(w.sockets(), names[0]+".sock")),
		"%d sockets are left, that of the driver with deferred volumes: %t", len(left), exists(w.csi()))
}

// TestOneRegistrarLeavesNamesToOthers: what takes many names is one container, whose control group
// is that of this process here, and what makes many sockets has no driver behind them.
func TestOneRegistrarLeavesNamesToOthers(t *testing.T) {
	w := newWorld(t)
	w.startKubelet()
	w.startRegistry()
	var last *kubelet.Registrar
	for n := range 17 {
		d := w.driver(fmt.Sprintf("d%d.example.com", n), fmt.Sprintf("d%d.sock", n))
		check.Must(t, d.Start())
		last = w.registrar(d)
		check.Must(t, last.Start())
		if n < 16 {
			check.Eventually(t, d.Name+" is registered", func() bool { return w.kubelet.Endpoint(d.Name) != "" })
		}
	}
	check.Eventually(t, "the refusal", func() bool {
		verdicts := last.Verdicts()
		return len(verdicts) > 0 && strings.Contains(verdicts[0].Error, "registered 16 drivers already")
	})
	w.stop()

	for n := range 150 {
		dead := check.Value((&net.ListenConfig{}).Listen(t.Context(), "unix", fmt.Sprintf("%s/dead%d.sock", w.ours(), n)))(t)
		t.Cleanup(func() { _ = dead.Close() })
	}
	w.whose = ownContainer
	w.times.untold, w.times.firstRetry, w.times.lastRetry, w.times.call = 3*time.Second, time.Second, time.Second, time.Second
	w.startRegistry()
	for n := range 17 { // hardly all of them were among the first 128
		driver, ready := fmt.Sprintf("d%d.example.com", n), false
		check.Eventually(t, driver+" was ready beside them", func() bool {
			one, there := w.shown(driver)
			ready = ready || there && one.Ready
			return ready
		})
	}
}
