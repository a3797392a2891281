package registry

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

// settlingWorld is a world where registrations that may be lost are renewed, and counts the renewals.
func settlingWorld(t *testing.T, settle time.Duration) (w *world, renewed *atomic.Int64) {
	t.Helper()
	renewed = new(atomic.Int64)
	return runningWith(t, func(w *world) {
		w.times.settle, w.times.unsettled = settle, time.Minute
		w.renewed = func(string) { renewed.Add(1) }
	}), renewed
}

// TestRegistrationThatKubeletLosesIsRenewed: the driver was registered with kubelet directly, and moves behind the
// front. The removal that belongs to the direct socket comes after our registration.
func TestRegistrationThatKubeletLosesIsRenewed(t *testing.T) {
	w, renewed := settlingWorld(t, 150*turn)
	d := w.driver(name, "driver.sock")
	check.Must(t, d.Start())
	direct := w.direct(d, w.kubeletDir())
	direct.Versions = nil
	check.Must(t, direct.Start())
	check.Eventually(t, "kubelet has it", func() bool { return w.kubelet.InNode(name) })
	check.Must(t, w.registrar(d).Start())
	check.Eventually(t, "ours is refused", func() bool { one, _ := w.shown(name); return strings.Contains(one.Kubelet, "refused") })
	w.kubelet.UninstallTakes(10 * turn)
	check.Must(t, direct.Stop())
	check.Eventually(t, "it is to be renewed", func() bool { one, _ := w.shown(name); return strings.Contains(one.Kubelet, "to be renewed") })
	check.Eventually(t, "it is renewed", func() bool { return renewed.Load() == 1 })
	check.Eventually(t, "kubelet has seen that", func() bool { return w.kubelet.Count(kubelet.Registered) >= 3 })
	w.served("driver.sock")
	w.steady()
	check.That(t, w.kubelet.InNode(name) && renewed.Load() == 1, "the CSINode has it: %t, after %d renewals", w.kubelet.InNode(name), renewed.Load())
}

// TestRegistrationAfterTheStartIsRenewedOnce where no socket of ours stood, and not when the daemon starts again.
func TestRegistrationAfterTheStartIsRenewedOnce(t *testing.T) {
	w, renewed := settlingWorld(t, 15*turn)
	w.pair()
	check.Eventually(t, "it is renewed", func() bool { return renewed.Load() == 1 })
	check.Eventually(t, "kubelet has seen that", func() bool { return w.kubelet.Count(kubelet.Registered) == 2 })
	w.served("driver.sock")
	w.steady()
	w.stop()
	w.startRegistry()
	w.served("driver.sock")
	w.steady()
	check.That(t, renewed.Load() == 1, "it was renewed %d times", renewed.Load())
}
