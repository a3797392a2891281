package registry_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/kubeletemu"
)

func TestRefusalsSayWhy(t *testing.T) {
	for what, test := range map[string]struct {
		change func(*world, *kubeletemu.Registrar)
		says   []string
	}{
		"another's name": {func(_ *world, r *kubeletemu.Registrar) { r.Name = "tape.csi.example.com" }, []string{"tape.csi.example.com", "calls itself", name}},
		"old version":    {func(_ *world, r *kubeletemu.Registrar) { r.Versions = []string{"0.3.0"} }, []string{name, "0.3.0", "version 1 is needed"}},
		"no version":     {func(_ *world, r *kubeletemu.Registrar) { r.Versions = []string{} }, []string{name, "version 1 is needed"}},
		"relative path":  {func(_ *world, r *kubeletemu.Registrar) { r.Endpoint = "csi.sock" }, []string{name, "csi.sock", "not an absolute path"}},
		"long path":      {func(_ *world, r *kubeletemu.Registrar) { r.Endpoint = "/" + strings.Repeat("x", 107) }, []string{name, "107 bytes"}},
		"our own socket": {func(w *world, r *kubeletemu.Registrar) { r.Endpoint = w.csi() }, []string{name, "own socket", "--kubelet-registration-path"}},
		"other plugin":   {func(_ *world, r *kubeletemu.Registrar) { r.Type = "DevicePlugin" }, []string{"DevicePlugin", "CSIPlugin"}},
		"long name":      {func(_ *world, r *kubeletemu.Registrar) { r.Name = strings.Repeat("x", 64) }, []string{"64", "63"}},
		"name of a path": {func(_ *world, r *kubeletemu.Registrar) { r.File, r.Name = "odd", "../odd" }, []string{"../odd", "no CSI driver's name"}},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			w := running(t)
			d := w.driver(name, "driver.sock")
			check(t, d.Start())
			r := w.registrar(d)
			r.Restart = 0
			test.change(w, r)
			check(t, r.Start())
			refusedWith(t, r, test.says...)
			w.nothingMade()
			if all := w.registry.List(); len(all) != 1 || all[0].Ready || !strings.Contains(all[0].Problem, test.says[0]) ||
				(all[0].Name != "") != (what != "long name" && what != "name of a path") {
				t.Errorf("listed: %+v", all)
			}
		})
	}
}

// nothingMade says that kubelet heard of nothing, and that nothing is served.
func (w *world) nothingMade() {
	w.t.Helper()
	for _, dir := range []string{w.kubeletDir(), w.sockets()} {
		if found, err := os.ReadDir(dir); err != nil || len(found) > 0 {
			w.t.Errorf("%s holds %v, %v", dir, found, err)
		}
	}
}

func TestSecondDriverOfOneNameWaits(t *testing.T) {
	t.Parallel()
	w := running(t)
	_, first := w.pair()
	w.served("driver.sock")
	other := w.driver(name, "other.sock")
	check(t, other.Start())
	second := w.registrar(other)
	second.File = "second-reg.sock"
	check(t, second.Start())
	refusedWith(t, second, name, "already", first.Socket(), first.Endpoint, second.Socket(), second.Endpoint)
	time.Sleep(quiet)
	w.served("driver.sock")
	if len(w.registry.List()) != 2 {
		t.Errorf("both should be listed: %+v", w.registry.List())
	}
	check(t, first.Stop())
	w.served("other.sock")
	w.neverRefused()
	eventually(t, "the second hears that it is registered", func() bool {
		all := second.Verdicts()
		return all[len(all)-1].Registered
	})
}

func TestDriverThatComesUpLate(t *testing.T) {
	for what, start := range map[string]func(*kubeletemu.Driver) (mend func()){
		"not listening": func(d *kubeletemu.Driver) func() { return func() { _ = d.Start() } },
		"without a node": func(d *kubeletemu.Driver) func() {
			d.FailNodeGetInfo(errors.New("no label yet"))
			_ = d.Start()
			return func() { d.FailNodeGetInfo(nil) }
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			w := running(t)
			d := w.driver(name, "driver.sock")
			mend := start(d)
			r := w.registrar(d)
			check(t, r.Start())
			eventually(t, "its problem is listed", func() bool { one, _ := w.shown(name); return strings.Contains(one.Problem, d.Socket) })
			if len(r.Verdicts()) > 0 || len(w.kubelet.Events()) > 0 {
				t.Errorf("too early: %v, %v", r.Verdicts(), w.kubelet.Events())
			}
			mend()
			w.served("driver.sock")
			w.neverRefused()
		})
	}
}

func TestRegistrarHearsOfADriverThatStaysAway(t *testing.T) {
	t.Parallel()
	w := running(t)
	d := w.driver(name, "driver.sock")
	d.FailNodeGetInfo(errors.New("no label"))
	check(t, d.Start())
	r := w.registrar(d)
	check(t, r.Start())
	refusedWith(t, r, name, d.Socket, "NodeGetInfo", "no label")
	w.nothingMade()
	d.FailNodeGetInfo(nil)
	w.served("driver.sock")
	w.neverRefused()
}

func TestKubeletRefusesAtFirst(t *testing.T) {
	for _, restart := range []time.Duration{0, 5 * turn} {
		t.Run(restart.String(), func(t *testing.T) {
			t.Parallel()
			w := running(t)
			w.kubelet.RefuseNext(2)
			d := w.driver(name, "driver.sock")
			check(t, d.Start())
			r := w.registrar(d)
			r.Restart = restart // one that does not come back leaves its socket: kubelet is asked again all the same
			check(t, r.Start())
			refusedWith(t, r, "refused for the test")
			eventually(t, "kubelet has it", func() bool { return w.kubelet.Endpoint(name) == w.csi() })
			w.steady()
		})
	}
}

func TestHangingRegistrarHurtsOnlyItself(t *testing.T) {
	t.Parallel()
	w := running(t)
	hung := w.registrar(w.driver("a.csi.example.com", "hung.sock"))
	hung.Hang = make(chan struct{})
	defer close(hung.Hang)
	check(t, hung.Start())
	w.pair()
	w.served("driver.sock")
	eventually(t, "it is listed", func() bool {
		for _, one := range w.registry.List() {
			if one.Registrar == hung.Socket() && strings.Contains(one.Problem, "does not answer") {
				return true
			}
		}
		return false
	})
}

func TestWrongRegistrarDivertsNothing(t *testing.T) {
	t.Parallel()
	w := running(t)
	_, r := w.pair()
	w.served("driver.sock")
	check(t, r.Stop())
	other := w.driver("other.csi.example.com", "other.sock")
	check(t, other.Start())
	wrong := w.registrar(other)
	wrong.File, wrong.Name, wrong.Restart = filepath.Base(r.Socket()), name, 0
	check(t, wrong.Start())
	refusedWith(t, wrong, name, "other.csi.example.com")
	if node, err := askNode(w.csi()); err != nil || node != "driver.sock" {
		t.Errorf("the CSI socket leads to %q, %v", node, err)
	}
}
