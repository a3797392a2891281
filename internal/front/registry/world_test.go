package registry

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-proxy/crust-proxy/internal/front/passthrough"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

const (
	name  = "disk.csi.example.com"
	turn  = 20 * time.Millisecond // of kubelet's loop
	quiet = 8 * turn              // long enough for what must not happen to happen
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a node with its directories, and the parts that run on it.
type world struct {
	t        *testing.T
	dir      string
	registry *Registry // the one of now
	kubelet  *kubelet.Kubelet
	stop     func() // the registry
	told     bool   // see tells

	grace   time.Duration
	times   times // of the next registry, as are grace, whose and renewed
	whose   func(context.Context, string) string
	renewed func(driver string)

	mu       sync.Mutex
	deferred map[string]bool
	alarms   []alarm
}

type alarm struct {
	driver string
	on     bool
}

func newWorld(t *testing.T) *world {
	t.Helper()
	dir := check.ShortDir(t)
	w := &world{t: t, dir: dir, deferred: make(map[string]bool), grace: time.Minute, times: times{
		// These are for a busy machine: a test that does not want them to end must not meet their end.
		call: 10 * time.Second, nodeInfo: time.Minute, untold: time.Minute, silence: 3 * time.Minute,
		nodeCheck: time.Hour, nodeCheckSoon: time.Hour, lastRenewal: time.Hour, lastCalls: 10 * time.Second,
		rescan: turn, watched: time.Hour, gather: turn / 4, firstRetry: turn / 2, lastRetry: 2 * turn, away: 3 * turn, lastRefusal: 8 * turn, settle: turn,
		unsettled: time.Nanosecond, // no renewals
	}}
	check.Must(t, os.Mkdir(w.kubeletDir(), 0o750))
	return w
}

// running is a world where all but the driver runs. Its test runs beside others.
func running(t *testing.T) *world { return runningWith(t, func(*world) {}) }

func runningWith(t *testing.T, change func(*world)) *world {
	t.Parallel()
	w := newWorld(t)
	w.tells()
	w.startKubelet()
	change(w)
	w.startRegistry()
	return w
}

// runningPair is a world with one driver, which kubelet calls through the front.
func runningPair(t *testing.T) (*world, *kubelet.Driver, *kubelet.Registrar) {
	t.Helper()
	w := running(t)
	d, r := w.pair()
	w.served("driver.sock")
	return w, d, r
}

func (w *world) kubeletDir() string { return filepath.Join(w.dir, "kubelet") }
func (w *world) ours() string       { return filepath.Join(w.dir, "run/ours") }
func (w *world) sockets() string    { return filepath.Join(w.dir, "run/csi") }
func (w *world) csi() string        { return filepath.Join(w.sockets(), name+".sock") }
func (w *world) offered() string    { return filepath.Join(w.kubeletDir(), name+Suffix) }

func (w *world) config() Config {
	return Config{
		Registry: w.ours(), KubeletRegistry: w.kubeletDir(), Sockets: w.sockets(), Grace: w.grace, Patience: time.Second,
		Log: zap.NewNop(), Front: w, Metrics: w,
	}
}

func (w *world) ServerOptions(_ string, has *csi.NodeGetCapabilitiesResponse, conn grpc.ClientConnInterface) []grpc.ServerOption {
	check.That(w.t, len(has.GetCapabilities()) != 0, "a driver is served before its capabilities are known")
	return passthrough.New(conn, nil).ServerOptions()
}

func (w *world) Deferred(driver string) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.deferred[driver] {
		return nil
	}
	return []string{"/pods/a/mount"}
}

func (w *world) DriverBypassed(driver string, on bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.alarms = append(w.alarms, alarm{driver, on})
}

func (w *world) RegistrationRenewed(driver string) {
	if w.renewed != nil {
		w.renewed(driver)
	}
}

func (w *world) lastAlarm() alarm {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.alarms) == 0 {
		return alarm{}
	}
	return w.alarms[len(w.alarms)-1]
}

func (w *world) startRegistry() { w.startRegistryWith(w.config()) }

func (w *world) startRegistryWith(cfg Config) {
	w.registry = newRegistry(cfg, w.times)
	w.registry.looks.Time, w.registry.endpoints.looks.Time = time.Minute, time.Minute
	if w.whose != nil {
		w.registry.whose = w.whose
	}
	w.stop = check.Running(w.t, w.registry.Run)
}

func (w *world) startKubelet() {
	started := check.Value(kubelet.Start(w.kubeletDir(), turn))(w.t)
	w.t.Cleanup(started.Stop)
	w.kubelet = started
}

// driver makes a driver whose node is its socket's name.
func (w *world) driver(called, socket string) *kubelet.Driver {
	d := &kubelet.Driver{Name: called, Version: "v7", Node: socket, Socket: filepath.Join(w.dir, socket)}
	w.t.Cleanup(d.Kill)
	return d
}

// registrar makes the registrar of a driver, in our directory.
func (w *world) registrar(d *kubelet.Driver) *kubelet.Registrar {
	check.Must(w.t, os.MkdirAll(w.ours(), 0o750))
	r := &kubelet.Registrar{Dir: w.ours(), Name: d.Name, Endpoint: d.Socket, Restart: 5 * turn}
	w.t.Cleanup(r.Kill)
	return r
}

func (w *world) pair() (*kubelet.Driver, *kubelet.Registrar) {
	d := w.driver(name, "driver.sock")
	r := w.registrar(d)
	check.Must(w.t, d.Start())
	check.Must(w.t, r.Start())
	return d, r
}

// served says that kubelet calls our socket, and gets to the driver.
func (w *world) served(node string) {
	w.t.Helper()
	w.tells()
	check.Eventually(w.t, "kubelet calls ours", func() bool { return w.kubelet.Endpoint(name) == w.csi() })
	check.Eventually(w.t, "the driver answers", func() bool {
		got, err := askNode(w.csi())
		return err == nil && got == node
	})
	check.Eventually(w.t, "the driver is shown as ready", func() bool {
		one, found := w.shown(name)
		return found && one.Ready && one.Kubelet == "registered" && one.Socket == w.csi()
	})
}

// tells has a test that fails say how things stand.
func (w *world) tells() {
	if w.told {
		return
	}
	w.told = true
	w.t.Cleanup(func() {
		if w.t.Failed() {
			w.t.Logf("kubelet did %+v\nlisted are %+v", w.kubelet.Events(), w.registry.List())
		}
	})
}

// steady says that kubelet becomes content, and stays so without a new registration.
func (w *world) steady() {
	w.t.Helper()
	check.Eventually(w.t, "it holds", func() bool {
		before := len(w.kubelet.Events())
		time.Sleep(quiet)
		return len(w.kubelet.Events()) == before && w.kubelet.Endpoint(name) == w.csi()
	})
}

func (w *world) neverRefused() {
	w.t.Helper()
	check.That(w.t, w.kubelet.Count(kubelet.Refused) == 0, "kubelet refused: %+v", w.kubelet.Events())
}

func (w *world) shown(driver string) (State, bool) {
	for _, one := range w.registry.List() {
		if one.Name == driver {
			return one, true
		}
	}
	return State{}, false
}

// refusedWith says that a registrar was told no, with a text that has all parts.
func refusedWith(t *testing.T, r *kubelet.Registrar, parts ...string) {
	t.Helper()
	check.Eventually(t, "the registrar is refused", func() bool { return len(r.Verdicts()) > 0 })
	got := r.Verdicts()[0]
	check.That(t, !got.Registered, "the verdict is %+v", got)
	check.Says(t, "the verdict", got.Error, parts...)
}

func askNode(socket string) (string, error) {
	conn, err := connect(socket)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	info, err := csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	return info.GetNodeId(), err
}

func connect(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
