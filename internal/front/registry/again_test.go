package registry

import (
	"os"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

// TestRegistrarThatRestartsAtOnceIsNotRefused makes its socket anew while what we
// did for the old one is still ending, and has the driver's name.
func TestRegistrarThatRestartsAtOnceIsNotRefused(t *testing.T) {
	t.Parallel()
	w := running(t)
	_, r := w.pair()
	w.served("driver.sock")
	for i := range 30 {
		if i%2 == 0 {
			r.Kill()
		} else {
			check.Must(t, r.Stop())
		}
		time.Sleep(time.Duration(i%4) * turn / 2)
		check.Must(t, r.Start())
		time.Sleep(time.Duration(i%5) * turn / 2)
	}
	w.served("driver.sock")
	for _, verdict := range r.Verdicts() {
		if !verdict.Registered {
			t.Errorf("it was refused: %s", verdict.Error)
		}
	}
}

// TestSocketThatChangesItsModeIsTheSame is of registrars that bind first and
// close their socket to others then.
func TestSocketThatChangesItsModeIsTheSame(t *testing.T) {
	t.Parallel()
	w := running(t)
	_, r := w.pair()
	w.served("driver.sock")
	check.Must(t, os.Chmod(r.Socket(), 0o600))
	check.Must(t, os.Chmod(w.offered(), 0o640))
	w.steady()
	if w.kubelet.Count(kubelet.Registered) != 1 {
		t.Errorf("it was registered again: %+v", w.kubelet.Events())
	}
}

// TestKubeletThatSaysNothingIsAskedAnew is of a kubelet whose word is lost.
func TestKubeletThatSaysNothingIsAskedAnew(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.times.silence = 75 * turn
	w.startRegistry()
	w.pair()
	check.Eventually(t, "the registration", func() bool { return exists(w.offered()) })
	first, err := os.Lstat(w.offered())
	check.Must(t, err)
	check.Eventually(t, "it was made anew", func() bool {
		now, err := os.Lstat(w.offered())
		return err == nil && !now.ModTime().Equal(first.ModTime())
	})
	w.startKubelet()
	w.served("driver.sock")
	w.steady()
}
