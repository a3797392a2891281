package registry

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

// TestTimesOfAState: another problem, or another word of kubelet's, does not begin it anew.
func TestTimesOfAState(t *testing.T) {
	s := &session{registry: New(Config{Log: zap.NewNop()})}
	s.setReady(&Driver{})
	ready := s.state().Since
	s.setProblem(errors.New("no answer"))
	s.setKubelet("waiting for kubelet")
	down := s.state()
	s.setProblem(errors.New("another name"))
	s.setKubelet("refused: the same name")
	now := s.state()
	check.That(t, down.Since.After(ready) && now.Since.Equal(down.Since) && !down.Waiting.IsZero() && now.Waiting.Equal(down.Waiting),
		"ready at %v, down at %+v, then %+v", ready, down, now)
	s.setKubelet(registered)
	check.That(t, s.state().Waiting.IsZero(), "registered, and waiting since %v", s.state().Waiting)
}

func TestUpgradeBesideTheOldDriver(t *testing.T) {
	for _, endpoint := range []string{"next.sock", "driver.sock"} {
		t.Run(endpoint, func(t *testing.T) { upgradesBesideTheOld(t, endpoint) })
	}
}

func upgradesBesideTheOld(t *testing.T, endpoint string) {
	w, _, r := runningPair(t)
	socket := check.Value(os.Lstat(w.csi()))(t)
	r.Kill() // the old driver still runs for a while
	next := w.driver(name, endpoint)
	next.Version = "v8"
	check.Must(t, next.Start())
	check.Must(t, w.registrar(next).Start())
	w.served(endpoint)
	now, err := os.Lstat(w.csi())
	check.That(t, err == nil && os.SameFile(socket, now), "the CSI socket was made anew, or has gone: %v", err)
	check.Eventually(t, "the new one is listed", func() bool {
		one, _ := w.shown(name)
		return one.Ready && one.Version == "v8" && one.Endpoint == next.Socket
	})
	w.neverRefused()
}

func TestDriverAloneRestarts(t *testing.T) {
	w, d, _ := runningPair(t)
	d.Kill()
	check.Eventually(t, "it is listed as not ready", func() bool { one, _ := w.shown(name); return !one.Ready && one.Problem != "" })
	check.That(t, w.kubelet.Endpoint(name) != "", "kubelet was told although the registrar stands")
	d.Version = "v8"
	check.Must(t, d.Start())
	w.served("driver.sock")
	one, _ := w.shown(name)
	check.That(t, one.Version == "v8", "listed: %+v", one)
	check.That(t, w.kubelet.Count(kubelet.Registered) == 1, "events: %+v", w.kubelet.Events())
}

func TestOurRestartIsNoDeregistration(t *testing.T) {
	w, _, r := runningPair(t)
	w.stop()
	check.Require(t, exists(w.csi()) && exists(w.offered()), "a socket went with us")
	time.Sleep(quiet)
	kept := w.kubelet.Endpoint(name) == w.csi() && w.kubelet.Count(kubelet.Deregistered) == 0
	check.Require(t, kept, "kubelet did not keep the driver: %+v", w.kubelet.Events())
	before := len(r.Verdicts())
	w.startRegistry()
	check.Eventually(t, "it registers again", func() bool { return len(r.Verdicts()) > before })
	w.served("driver.sock")
	w.neverRefused()
	w.steady()
}

// TestCallThatTakesLongWhenWeEnd: meanwhile kubelet's calls to other drivers get through.
func TestCallThatTakesLongWhenWeEnd(t *testing.T) {
	t.Parallel()
	callWhenWeEnd(t, time.Minute, true)
}

// TestLastCallsWhenWeEnd: a call may have just begun when another one has used up the time.
func TestLastCallsWhenWeEnd(t *testing.T) {
	t.Parallel()
	callWhenWeEnd(t, turn, false)
}

func callWhenWeEnd(t *testing.T, patience time.Duration, others bool) {
	w := newWorld(t)
	w.startKubelet()
	cfg := w.config()
	cfg.Patience = patience
	w.startRegistryWith(cfg)
	d, _ := w.pair()
	other := w.driver("other.csi.example.com", "other.sock")
	check.Must(t, other.Start())
	check.Must(t, w.registrar(other).Start())
	w.served("driver.sock")
	check.Eventually(t, "the other driver is registered", func() bool { one, _ := w.shown(other.Name); return one.Kubelet == registered })
	answers, ended := make(chan struct{}), make(chan struct{})
	d.Hang.Store(&answers)
	conn := check.Value(connect(w.csi()))(t)
	defer func() { _ = conn.Close() }()
	answered := check.Begin(func() error {
		return check.Err(csi.NewNodeClient(conn).NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{}))
	})
	check.Eventually(t, "the call is under way", d.Hangs.Load)
	go func() { w.stop(); close(ended) }()
	time.Sleep(quiet)
	_, err := askNode(filepath.Join(w.sockets(), other.Name+".sock"))
	check.That(t, err == nil || !others, "the other driver cannot be called: %v", err)
	close(answers)
	check.Must(t, <-answered)
	<-ended
}

// TestOurRestartWhileNodeGetInfoFails: kubelet asks for it at a registration alone, and keeps calling the driver for
// the volumes that there are.
func TestOurRestartWhileNodeGetInfoFails(t *testing.T) {
	w, d, r := runningPair(t)
	check.Eventually(t, "the registrar has its verdict", func() bool { return len(r.Verdicts()) == 1 }) // else it may get it later
	w.stop()
	d.FailNodeGetInfo(errors.New("the array is down"))
	check.Must(t, os.Remove(w.csi()))
	w.times.untold, w.grace = turn, 150*turn // in which the registrar is found again
	w.startRegistry()
	check.Eventually(t, "its problem is listed", func() bool { one, _ := w.shown(name); return strings.Contains(one.Problem, "the array is down") })
	time.Sleep(w.grace + quiet)
	conn := check.Value(connect(w.csi()))(t)
	defer func() { _ = conn.Close() }()
	check.NoError(t, check.Err(csi.NewIdentityClient(conn).Probe(t.Context(), &csi.ProbeRequest{})), "calls are not passed on")
	check.That(t, w.kubelet.Endpoint(name) == w.csi() && w.kubelet.Count(kubelet.Deregistered) == 0, "events: %+v", w.kubelet.Events())
	check.That(t, len(r.Verdicts()) == 1, "the registrar was told, and would exit: %+v", r.Verdicts())
	d.FailNodeGetInfo(nil)
	w.served("driver.sock")
	w.neverRefused()
}

// TestRegistrationThatCannotBeMadeAnew: kubelet keeps the driver while no socket can be made, and whoever
// has a lock on kubelet's directory, as each can who can read it, hinders nobody.
func TestRegistrationThatCannotBeMadeAnew(t *testing.T) {
	w, _, r := runningPair(t)
	locked := check.Value(os.Open(w.kubeletDir()))(t)
	defer func() { _ = locked.Close() }()
	check.Must(t, unix.Flock(int(locked.Fd()), unix.LOCK_EX))
	block := w.blocked()
	w.grace = 150 * turn // in which the registrar is found again
	w.stop()
	w.startRegistry()
	check.Eventually(t, "it says why", func() bool {
		one, _ := w.shown(name)
		return strings.HasPrefix(one.Kubelet, "not registered anew: listen on ")
	})
	time.Sleep(w.grace + quiet)
	check.That(t, w.kubelet.Endpoint(name) == w.csi() && w.kubelet.Count(kubelet.Deregistered) == 0, "events: %+v", w.kubelet.Events())
	before := len(r.Verdicts())
	check.Must(t, os.Remove(block))
	check.Eventually(t, "it registers again", func() bool { return len(r.Verdicts()) > before })
	w.served("driver.sock")
	w.neverRefused()
}

// blocked has no registration socket be made until the directory is gone.
func (w *world) blocked() (dir string) {
	sum := sha256.Sum256([]byte(filepath.Base(w.offered())))
	dir = filepath.Join(w.kubeletDir(), ".crust-proxy."+hex.EncodeToString(sum[:8]))
	check.Must(w.t, os.Mkdir(dir, 0o700))
	return dir
}

// TestRegistrationIsServedUntilTheNext: a kubelet that comes meanwhile finds somebody behind the socket.
func TestRegistrationIsServedUntilTheNext(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.times.silence = 20 * turn
	w.startRegistry()
	w.pair()
	check.Eventually(t, "it is offered", func() bool { return exists(w.offered()) })
	w.blocked()
	check.Eventually(t, "the next cannot be made", func() bool {
		one, _ := w.shown(name)
		return strings.HasPrefix(one.Kubelet, "not registered anew: listen on ")
	})
	check.Must(t, check.Value(new(net.Dialer).DialContext(t.Context(), "unix", w.offered()))(t).Close())
}

func TestStaleRegistrationsGoAfterGrace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.startKubelet()
	gone := filepath.Join(w.kubeletDir(), "gone.csi.example.com"+Suffix)
	foreign := filepath.Join(w.kubeletDir(), "foreign-reg.sock")
	for _, path := range []string{gone, foreign} {
		check.StaleSocket(t, path)
	}
	w.grace = 20 * turn
	begin := time.Now()
	w.startRegistry()
	w.pair()
	w.served("driver.sock")
	check.That(t, exists(gone) || time.Since(begin) >= w.grace, "it was removed too early")
	check.Eventually(t, "the stale one goes", func() bool { return !exists(gone) })
	time.Sleep(quiet)
	check.That(t, exists(foreign) && exists(w.offered()), "another's went too, or that of a driver that is here")
}

func TestKubeletDirectoryComesLateAndAnew(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	check.Must(t, os.Remove(w.kubeletDir()))
	w.startRegistry()
	w.pair()
	check.Eventually(t, "it says what it waits for", func() bool {
		one, _ := w.shown(name)
		return one.Ready && one.Kubelet == "kubelet's registry "+w.kubeletDir()+" is not there yet"
	})
	for range 2 {
		check.Must(t, os.Mkdir(w.kubeletDir(), 0o750))
		w.startKubelet()
		w.served("driver.sock")
		w.neverRefused()
		w.kubelet.Stop()
		check.Eventually(t, "it is removed", func() bool { return os.RemoveAll(w.kubeletDir()) == nil }) // a socket may be made meanwhile
	}
}

func TestSocketsThatSomebodyRemoved(t *testing.T) {
	w := runningWith(t, func(w *world) { w.times.watched = turn })
	check.Must(t, os.RemoveAll(w.sockets())) // before there is one to be made anew
	w.pair()
	w.served("driver.sock")
	for path, want := range map[string]os.FileMode{w.sockets(): 0o700, w.csi(): 0o600, w.offered(): 0o600} {
		info, err := os.Lstat(path)
		check.That(t, err == nil && info.Mode().Perm() == want, "%s: %v, %v", path, info.Mode(), err)
	}
	check.Eventually(t, "they are removed", func() bool { return os.RemoveAll(w.sockets()) == nil }) // one may be made meanwhile
	w.served("driver.sock")
	w.registry.mu.Lock()
	err := w.registry.served[name].listener.Close() // as the kernel's errors have it closed
	w.registry.mu.Unlock()
	check.Must(t, err)
	w.served("driver.sock")
	check.Must(t, os.Remove(w.offered()))
	check.Eventually(t, "it is made anew", func() bool { return w.kubelet.Count(kubelet.Registered) == 2 })
	w.served("driver.sock")
	w.neverRefused()
}

// TestSocketThatCannotBeMade leaves nothing behind, for it is tried every few seconds.
func TestSocketThatCannotBeMade(t *testing.T) {
	cfg := newWorld(t).config()
	cfg.Sockets = filepath.Join(cfg.Sockets, "file")
	check.Must(t, os.MkdirAll(filepath.Dir(cfg.Sockets), 0o700))
	check.Must(t, os.WriteFile(cfg.Sockets, nil, 0o600))
	driver := &Driver{Name: name, reply: &csi.NodeGetCapabilitiesResponse{Capabilities: []*csi.NodeServiceCapability{{}}}}
	r, before := New(cfg), runtime.NumGoroutine()
	for range 10 {
		check.Fails(t, check.Err(r.serve(driver, &connection{})))
	}
	check.Eventually(t, "nothing of them runs", func() bool { return runtime.NumGoroutine() <= before })
}

func TestOurDirectoryAnew(t *testing.T) {
	w, _, r := runningPair(t)
	check.Must(t, os.RemoveAll(w.ours()))
	check.Eventually(t, "it is made again, and the driver gone", func() bool { return exists(w.ours()) && w.kubelet.Endpoint(name) == "" })
	r.Kill()
	check.Must(t, r.Start())
	w.served("driver.sock")
	w.neverRefused()
}

// TestKubeletStartsWhileTheDriverIsDown: kubelet's NodeGetInfo fails then, and
// asking it again is of no use before the driver is back.
func TestKubeletStartsWhileTheDriverIsDown(t *testing.T) {
	for _, restart := range []time.Duration{0, 2 * turn} {
		t.Run(restart.String(), func(t *testing.T) {
			w, d, r := runningPair(t)
			w.kubelet.Stop()
			r.SetRestart(restart)
			d.Kill()
			w.startKubelet()
			check.Eventually(t, "kubelet refuses", func() bool { return w.kubelet.Count(kubelet.Refused) == 1 })
			time.Sleep(quiet)
			n := w.kubelet.Count(kubelet.Refused)
			check.That(t, n <= 1, "kubelet was asked %d times without a driver", n)
			check.Must(t, d.Start())
			check.Eventually(t, "kubelet has it", func() bool { return w.kubelet.Endpoint(name) == w.csi() })
			w.steady()
		})
	}
}

// TestRegistrarThatRestartsAtOnceIsNotRefused makes its socket anew while what we
// did for the old one is still ending, and has the driver's name.
func TestRegistrarThatRestartsAtOnceIsNotRefused(t *testing.T) {
	w, _, r := runningPair(t)
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
		check.That(t, verdict.Registered, "it was refused: %s", verdict.Error)
	}
}

// TestSocketThatChangesItsModeIsTheSame is of registrars that bind first and close their socket to others then.
func TestSocketThatChangesItsModeIsTheSame(t *testing.T) {
	w, _, r := runningPair(t)
	check.Must(t, os.Chmod(r.Socket(), 0o600))
	check.Must(t, os.Chmod(w.offered(), 0o640))
	w.steady()
	check.That(t, w.kubelet.Count(kubelet.Registered) == 1, "it was registered again: %+v", w.kubelet.Events())
}

// TestKubeletThatSaysNothingIsAskedAnew is of a kubelet whose word is lost.
func TestKubeletThatSaysNothingIsAskedAnew(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.times.silence = 75 * turn
	w.startRegistry()
	w.pair()
	check.Eventually(t, "the registration", func() bool { return exists(w.offered()) })
	first := check.Value(os.Lstat(w.offered()))(t)
	check.Eventually(t, "it was made anew", func() bool {
		now, err := os.Lstat(w.offered())
		return err == nil && !now.ModTime().Equal(first.ModTime())
	})
	w.startKubelet()
	w.served("driver.sock")
	w.steady()
}

func TestLongestNameBelowALongDirectory(t *testing.T) {
	for _, dir := range []string{"/run", "/" + strings.Repeat("d", 84)} { // a hash has 16 characters
		path := socketPath(dir, strings.Repeat("n", 63))
		other := socketPath(dir, strings.Repeat("n", 62)+"m")
		check.That(t, len(path) <= sys.MaxSocketPath && filepath.Dir(path) == dir && path != other, "%s has %d bytes", path, len(path))
	}
}

// TestNothingIsStaleWhenTheDaemonEnds: sessions give their drivers' names back then, while a last look at the
// directories may still be under way. The registrations must stay, or kubelet would take the drivers from the node.
func TestNothingIsStaleWhenTheDaemonEnds(t *testing.T) {
	dir := t.TempDir()
	path := dir + "/disk.csi.example.com" + Suffix
	check.Must(t, os.WriteFile(path, nil, 0o600))
	r := New(Config{KubeletRegistry: dir, Log: zap.NewNop()})
	found := map[string]socketID{path: idAt(path)}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	r.dropStale(ended, found)
	check.NoError(t, check.Err(os.Lstat(path)), "it was removed when the daemon ended")
	r.dropStale(t.Context(), found)
	check.That(t, check.Err(os.Lstat(path)) != nil, "nobody serves it, and it stays")
}

func TestWithdraw(t *testing.T) {
	w := newWorld(t)
	dead, foreign, served := w.offered(), filepath.Join(w.kubeletDir(), "foreign-reg.sock"), filepath.Join(w.kubeletDir(), "served"+Suffix)
	check.StaleSocket(t, dead)
	check.StaleSocket(t, foreign)
	l := check.Value(net.Listen("unix", served))(t)
	defer func() { _ = l.Close() }()
	check.Must(t, os.WriteFile(filepath.Join(w.kubeletDir(), "file"+Suffix), nil, 0o600))
	gone := Withdraw(w.kubeletDir())
	check.That(t, slices.Equal(gone, []string{dead}), "withdrawn: %q", gone)
	left, err := os.ReadDir(w.kubeletDir())
	check.That(t, err == nil && len(left) == 3, "left: %v, %v", left, err)
	gone = Withdraw(w.kubeletDir() + "/nowhere")
	check.That(t, gone == nil, "withdrawn: %q", gone)
}
