package registry_test

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/front/registry"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

// settling is a world where registrations that may be lost are renewed, and counts
// the renewals.
func settling(t *testing.T, settle time.Duration) (w *world, cfg registry.Config, renewed *atomic.Int64) {
	t.Helper()
	w, renewed = newWorld(t), new(atomic.Int64)
	w.tells()
	w.startKubelet()
	cfg = w.config()
	cfg.Times.Settle, cfg.Times.Unsettled = settle, time.Minute
	cfg.Renewed = func(driver string) {
		if driver != name {
			t.Errorf("renewed was %q", driver)
		}
		renewed.Add(1)
	}
	w.startRegistryWith(cfg)
	return w, cfg, renewed
}

// TestRegistrationThatKubeletLosesIsRenewed: the driver was registered with kubelet
// directly, and moves behind the front. The removal that belongs to the direct socket
// comes after our registration.
func TestRegistrationThatKubeletLosesIsRenewed(t *testing.T) {
	t.Parallel()
	w, _, renewed := settling(t, 50*turn)
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
	check.Eventually(t, "kubelet has seen that", func() bool { return w.kubelet.Count(kubelet.Registered) == 3 })
	w.served("driver.sock")
	w.steady()
	if !w.kubelet.InNode(name) || renewed.Load() != 1 {
		t.Errorf("the CSINode has it: %t, after %d renewals", w.kubelet.InNode(name), renewed.Load())
	}
}

// TestRegistrationAfterTheStartIsRenewedOnce where no socket of ours stood, and not
// when the daemon starts again.
func TestRegistrationAfterTheStartIsRenewedOnce(t *testing.T) {
	t.Parallel()
	w, cfg, renewed := settling(t, 3*turn)
	w.pair()
	check.Eventually(t, "it is renewed", func() bool { return renewed.Load() == 1 })
	check.Eventually(t, "kubelet has seen that", func() bool { return w.kubelet.Count(kubelet.Registered) == 2 })
	w.served("driver.sock")
	w.steady()
	w.stop()
	w.startRegistryWith(cfg)
	w.served("driver.sock")
	w.steady()
	if renewed.Load() != 1 {
		t.Errorf("it was renewed %d times", renewed.Load())
	}
}

// TestNoRenewalWhileAnotherSocketStands: kubelet could take that one instead.
func TestNoRenewalWhileAnotherSocketStands(t *testing.T) {
	t.Parallel()
	w, _, renewed := settling(t, 50*turn)
	d, _ := w.pair()
	check.Eventually(t, "kubelet calls ours", func() bool { return w.kubelet.Endpoint(name) == w.csi() })
	check.Must(t, w.direct(d, w.kubeletDir()).Start())
	check.Eventually(t, "the alarm", func() bool { return w.lastAlarm() == alarm{name, true} })
	check.Eventually(t, "the renewal is passed over", func() bool { one, _ := w.shown(name); return one.Kubelet == "registered" })
	time.Sleep(quiet)
	if renewed.Load() != 0 {
		t.Errorf("it was renewed %d times", renewed.Load())
	}
}
