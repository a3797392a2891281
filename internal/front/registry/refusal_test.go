package registry

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

func TestRefusalsSayWhy(t *testing.T) {
	for what, test := range map[string]struct {
		change func(*world, *kubelet.Registrar)
		says   []string
	}{
		"another's name": {func(_ *world, r *kubelet.Registrar) { r.Name = "tape.csi.example.com" }, []string{"tape.csi.example.com", "calls itself", name}},
		"old version":    {func(_ *world, r *kubelet.Registrar) { r.Versions = []string{"0.3.0"} }, []string{name, "0.3.0", "version 1 is needed"}},
		"no version":     {func(_ *world, r *kubelet.Registrar) { r.Versions = []string{} }, []string{name, "version 1 is needed"}},
		"many versions":  {func(_ *world, r *kubelet.Registrar) { r.Versions = slices.Repeat([]string{"1.0.0"}, 17) }, []string{name, "17 CSI versions"}},
		"relative path":  {func(_ *world, r *kubelet.Registrar) { r.Endpoint = "csi.sock" }, []string{name, "csi.sock", "not an absolute path"}},
		"long path":      {func(_ *world, r *kubelet.Registrar) { r.Endpoint = "/" + strings.Repeat("x", 107) }, []string{name, "107 bytes"}},
		"our own socket": {func(w *world, r *kubelet.Registrar) { r.Endpoint = w.csi() }, []string{name, "own socket", "--kubelet-registration-path"}},
		"other plugin":   {func(_ *world, r *kubelet.Registrar) { r.Type = "DevicePlugin" }, []string{"DevicePlugin", "CSIPlugin"}},
		"long name":      {func(_ *world, r *kubelet.Registrar) { r.Name = strings.Repeat("x", 64) }, []string{"64", "63"}},
		"name of a path": {func(_ *world, r *kubelet.Registrar) { r.File, r.Name = "odd", "../odd" }, []string{"../odd", "no CSI driver's name"}},
	} {
		t.Run(what, func(t *testing.T) {
			w := running(t)
			d := w.driver(name, "driver.sock")
			check.Must(t, d.Start())
			r := w.registrar(d)
			r.Restart = 0
			test.change(w, r)
			check.Must(t, r.Start())
			refusedWith(t, r, test.says...)
			w.nothingMade()
			check.Eventually(t, "the problem is listed", func() bool { // a dial may have been refused before
				all := w.registry.List()
				return len(all) == 1 && !all[0].Ready && strings.Contains(all[0].Problem, test.says[0]) &&
					(all[0].Name != "") == (what != "long name" && what != "name of a path")
			})
		})
	}
}

// nothingMade says that kubelet heard of nothing, and that nothing is served.
func (w *world) nothingMade() {
	w.t.Helper()
	for _, dir := range []string{w.kubeletDir(), w.sockets()} {
		found, err := os.ReadDir(dir)
		check.That(w.t, err == nil && len(found) == 0, "%s holds %v, %v", dir, found, err)
	}
}

func TestSecondDriverOfOneNameWaits(t *testing.T) {
	w, _, first := runningPair(t)
	other := w.driver(name, "other.sock")
	check.Must(t, other.Start())
	second := w.registrar(other)
	second.File = "second-reg.sock"
	check.Must(t, second.Start())
	refusedWith(t, second, name, "already", first.Socket(), first.Endpoint, second.Socket(), second.Endpoint)
	time.Sleep(quiet)
	w.served("driver.sock")
	check.Eventually(t, "both are listed", func() bool { return len(w.registry.List()) == 2 }) // not while the second makes its socket anew
	check.Must(t, first.Stop())
	w.served("other.sock")
	w.neverRefused()
	check.Eventually(t, "the second hears that it is registered", func() bool {
		all := second.Verdicts()
		return all[len(all)-1].Registered
	})
}

func TestDriverThatComesUpLate(t *testing.T) {
	for what, start := range map[string]func(*kubelet.Driver) (mend func()){
		"not listening": func(d *kubelet.Driver) func() { return func() { _ = d.Start() } },
		"without a node": func(d *kubelet.Driver) func() {
			d.FailNodeGetInfo(errors.New("no label yet"))
			_ = d.Start()
			return func() { d.FailNodeGetInfo(nil) }
		},
	} {
		t.Run(what, func(t *testing.T) {
			w := running(t)
			d := w.driver(name, "driver.sock")
			mend := start(d)
			r := w.registrar(d)
			check.Must(t, r.Start())
			check.Eventually(t, "its problem is listed", func() bool { one, _ := w.shown(name); return strings.Contains(one.Problem, d.Socket) })
			check.That(t, len(r.Verdicts()) == 0 && len(w.kubelet.Events()) == 0, "too early: %v, %v", r.Verdicts(), w.kubelet.Events())
			mend()
			w.served("driver.sock")
			w.neverRefused()
		})
	}
}

func TestRegistrarHearsOfADriverThatStaysAway(t *testing.T) {
	w := runningWith(t, func(w *world) { w.times.untold = 10 * turn })
	d := w.driver(name, "driver.sock")
	d.FailNodeGetInfo(errors.New("no label"))
	check.Must(t, d.Start())
	r := w.registrar(d)
	check.Must(t, r.Start())
	refusedWith(t, r, name, d.Socket, "NodeGetInfo", "no label")
	check.That(t, !exists(w.offered()), "kubelet heard of it")
	d.FailNodeGetInfo(nil)
	w.served("driver.sock")
	w.neverRefused()
}

// TestNodeGetInfoHasAsLongAsWithKubelet: some drivers ask their array first.
func TestNodeGetInfoHasAsLongAsWithKubelet(t *testing.T) {
	w := runningWith(t, func(w *world) { w.times.call = 5 * time.Second })
	d := w.driver(name, "driver.sock")
	answers := make(chan struct{})
	d.Hang.Store(&answers)
	check.Must(t, d.Start())
	r := w.registrar(d)
	check.Must(t, r.Start())
	check.Eventually(t, "NodeGetInfo is under way", d.Hangs.Load)
	time.Sleep(w.times.call + quiet)
	one, _ := w.shown(name)
	check.That(t, !strings.Contains(one.Problem, d.Socket) && len(r.Verdicts()) == 0, "given up: %+v, %v", one, r.Verdicts())
	close(answers)
	w.served("driver.sock")
	w.neverRefused()
}

func TestKubeletRefusesAtFirst(t *testing.T) {
	for _, restart := range []time.Duration{0, 5 * turn} {
		t.Run(restart.String(), func(t *testing.T) {
			w := running(t)
			w.kubelet.RefuseNext(2)
			d := w.driver(name, "driver.sock")
			check.Must(t, d.Start())
			r := w.registrar(d)
			r.Restart = restart // one that does not come back leaves its socket: kubelet is asked again all the same
			check.Must(t, r.Start())
			refusedWith(t, r, "refused for the test")
			check.Eventually(t, "kubelet has it", func() bool { return w.kubelet.Endpoint(name) == w.csi() })
			w.steady()
		})
	}
}

// TestDriverThatKubeletRefusesIsNotReady, also while it is offered again; the log has it once.
func TestDriverThatKubeletRefusesIsNotReady(t *testing.T) {
	core, logs := observer.New(zap.ErrorLevel)
	w := newWorld(t)
	w.startKubelet()
	w.kubelet.RefuseNext(1000)
	cfg := w.config()
	cfg.Log = zap.New(core)
	w.startRegistryWith(cfg)
	d := w.driver(name, "driver.sock")
	check.Must(t, d.Start())
	r := w.registrar(d)
	r.Restart = 0
	check.Must(t, r.Start())
	refusedWith(t, r, "refused for the test")
	check.Eventually(t, "kubelet refuses it again and again", func() bool {
		one, _ := w.shown(name)
		check.That(t, !one.Ready && strings.HasPrefix(one.Problem, "kubelet refused: ") && one.Socket != "", "shown is %+v", one)
		return w.kubelet.Count(kubelet.Refused) > 3
	})
	check.That(t, logs.FilterMessage("kubelet refused a driver").Len() == 1, "the log has %+v", logs.All())
	w.kubelet.RefuseNext(0)
	check.Eventually(t, "it is ready", func() bool { one, _ := w.shown(name); return one.Ready && one.Problem == "" })
}

func TestHangingRegistrarHurtsOnlyItself(t *testing.T) {
	w := runningWith(t, func(w *world) { w.times.call = time.Second })
	hung := w.registrar(w.driver("a.csi.example.com", "hung.sock"))
	hung.Hang = make(chan struct{})
	defer close(hung.Hang)
	check.Must(t, hung.Start())
	w.pair()
	w.served("driver.sock")
	check.Eventually(t, "it is listed", func() bool {
		for _, one := range w.registry.List() {
			if one.Registrar == hung.Socket() && strings.Contains(one.Problem, "does not answer") {
				return true
			}
		}
		return false
	})
}

func TestWrongRegistrarDivertsNothing(t *testing.T) {
	w, _, r := runningPair(t)
	check.Eventually(t, "the registrar has its verdict", func() bool { return len(r.Verdicts()) > 0 }) // else the next one gets it
	check.Must(t, r.Stop())
	other := w.driver("other.csi.example.com", "other.sock")
	check.Must(t, other.Start())
	wrong := w.registrar(other)
	wrong.File, wrong.Name, wrong.Restart = filepath.Base(r.Socket()), name, 0
	check.Must(t, wrong.Start())
	refusedWith(t, wrong, name, "other.csi.example.com")
	node, err := askNode(w.csi())
	check.That(t, err == nil && node == "driver.sock", "the CSI socket leads to %q, %v", node, err)
}

// TestRegistrarWithoutEndpoint: as with kubelet, its own socket is the driver's then.
func TestRegistrarWithoutEndpoint(t *testing.T) {
	info, err := driverCheck{}.accept("/r/a.sock", &registration.PluginInfo{Type: registration.CSIPlugin, Name: name, SupportedVersions: []string{"1.0.0"}})
	check.That(t, err == nil && info.Endpoint == "/r/a.sock", "%+v, %v", info, err)
}
