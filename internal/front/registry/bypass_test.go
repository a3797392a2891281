package registry

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

// direct is a registrar that lost its way: it registers with kubelet.
func (w *world) direct(d *kubelet.Driver, dir string) *kubelet.Registrar {
	r := w.registrar(d)
	r.Dir, r.Restart, r.Versions = dir, 0, []string{"1.9.0"} // a higher one: kubelet takes it although ours is there
	return r
}

func TestDirectRegistrationIsAnAlarm(t *testing.T) {
	w, d, _ := runningPair(t)
	direct := w.direct(d, w.kubeletDir())
	check.Must(t, direct.Start())
	check.Eventually(t, "the alarm", func() bool { return w.lastAlarm() == alarm{name, true} })
	check.Eventually(t, "kubelet goes past us", func() bool { return w.kubelet.Endpoint(name) == d.Socket })
	one, _ := w.shown(name)
	check.That(t, one.Bypassed, "it is not listed")
	text := w.registry.Bypassed()[name]
	check.That(t, strings.Contains(text, direct.Socket()) && strings.Contains(text, w.ours()), "the alarm says %q", text)
	check.Must(t, direct.Stop())
	check.Eventually(t, "no alarm", func() bool { return w.lastAlarm() == alarm{name, false} })
	// kubelet has deregistered the driver by its name, and would not come back to ours.
	w.served("driver.sock")
	w.steady()
	one, _ = w.shown(name)
	check.That(t, !one.Bypassed, "it is listed still")
}

func TestDirectRegistrationWithDeferredVolumesOnly(t *testing.T) {
	w := runningWith(t, func(w *world) { w.times.watched = turn })
	d := w.driver(name, "driver.sock")
	check.Must(t, d.Start())
	below := filepath.Join(w.kubeletDir(), "below")
	check.Must(t, os.Mkdir(below, 0o750))
	check.Must(t, w.direct(d, below).Start())
	check.Eventually(t, "kubelet has it", func() bool { return w.kubelet.Endpoint(name) == d.Socket })
	time.Sleep(quiet)
	check.Equal(t, w.lastAlarm(), (alarm{}), "an alarm of a driver that is none of ours")
	w.setDeferred(true)
	check.Eventually(t, "the alarm", func() bool { return w.lastAlarm() == alarm{name, true} })
	text := w.registry.Bypassed()[name]
	check.That(t, strings.Contains(text, "1 deferred volumes") && strings.Contains(text, "/pods/a/mount"), "the alarm says %q", text)
	w.setDeferred(false)
	check.Eventually(t, "no alarm", func() bool { return w.lastAlarm() == alarm{name, false} })
}

func (w *world) setDeferred(on bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deferred[name] = on
}

// TestDirectRegistrationThatWasFirst has kubelet refuse ours, of an equal version, until the other has gone.
func TestDirectRegistrationThatWasFirst(t *testing.T) {
	w := running(t)
	d := w.driver(name, "driver.sock")
	check.Must(t, d.Start())
	direct := w.direct(d, w.kubeletDir())
	direct.Versions = nil
	check.Must(t, direct.Start())
	check.Eventually(t, "kubelet has it", func() bool { return w.kubelet.Endpoint(name) == d.Socket })
	r := w.registrar(d)
	check.Must(t, r.Start())
	refusedWith(t, r, name, "equal or higher version")
	check.Eventually(t, "the alarm", func() bool { return w.lastAlarm() == alarm{name, true} })
	check.Eventually(t, "it is listed", func() bool { one, _ := w.shown(name); return strings.Contains(one.Kubelet, "refused") })
	check.Must(t, direct.Stop())
	w.served("driver.sock")
	w.steady()
}
