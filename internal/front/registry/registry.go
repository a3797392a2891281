// Package registry stands between the registrars of CSI drivers and kubelet. Registrars
// register with it as with kubelet, in a directory of ours. It registers each driver with
// kubelet under the driver's own name, with a CSI socket of ours.
package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Suffix ends the names of our registration sockets. It differs from what
// node-driver-registrar makes, so that both can be told apart.
const Suffix = ".crust-proxy-reg.sock"

// Config configures a Registry.
type Config struct {
	// Registry is where registrars make their sockets. It lies outside kubelet's,
	// whose watcher looks into sub-directories too.
	Registry string
	// KubeletRegistry is where kubelet looks for registration sockets.
	KubeletRegistry string
	// Sockets holds our CSI sockets. Only root can open it.
	Sockets string
	// Grace is how long after the start a registration of an earlier process is kept before
	// its driver has come back, and Patience how long calls under way may take when Run ends.
	Grace, Patience time.Duration
	Log             *zap.Logger
	// Self is the pid of this daemon: an endpoint that leads back to it is refused. 0 disables the check.
	Self    int
	Front   Front
	Metrics Metrics
	// CSINode is nil where no cluster is asked; then a registration that kubelet loses late is not noticed.
	CSINode CSINode
}

// Front serves the drivers' sockets.
type Front interface {
	// ServerOptions are those of the gRPC server that stands in for a driver, which has these capabilities.
	ServerOptions(name string, has *csi.NodeGetCapabilitiesResponse, driver grpc.ClientConnInterface) []grpc.ServerOption
	// Deferred names the deferred volumes of a driver that live on this node. It must not block.
	Deferred(driver string) []string
}

// Metrics counts what went wrong with registrations.
type Metrics interface {
	// DriverBypassed is called when a driver has registered with kubelet directly, and when that is over.
	DriverBypassed(driver string, on bool)
	// RegistrationRenewed is called when a registration that kubelet may have lost is renewed.
	RegistrationRenewed(driver string)
}

// CSINode reads which drivers are in the node's CSINode.
type CSINode interface {
	NodeDrivers(ctx context.Context) (map[string]bool, error)
}

// Registry follows registrars, drivers and kubelet.
type Registry struct {
	cfg     Config
	times   times
	whose   func(ctx context.Context, socket string) string // see controlGroup
	started time.Time
	alarmed map[string]bool // the drivers that were reported as bypassing; of Run alone
	unread  string          // why sockets could not be listed the last time; of Run alone
	looks   sys.Looks[string]
	due     chan struct{}      // has the directories read now
	notices map[string]*notice // of each directory its own, as one may hang; of Run

	endpoints endpoints // any number that hangs hides no directory

	mu       sync.Mutex
	sessions map[string]*session // by the registrar's socket
	names    map[string]*session // the session that has a driver's name
	served   map[string]*served  // the CSI sockets, by driver
	direct   map[string]*bypass  // sockets of others in kubelet's directory
	changed  chan struct{}       // closed when a name is released

	check      driverCheck
	departures *cache.LRUExpireCache // drivers of which a socket of others has lately gone from kubelet's directory
	left       *cache.LRUExpireCache // when the last registrar of a driver went
	node       *nodeCheck

	parts sync.WaitGroup
}

// New makes a registry; nothing happens before Run.
func New(cfg Config) *Registry { return newRegistry(cfg, defaultTimes()) }

func newRegistry(cfg Config, times times) *Registry {
	r := &Registry{
		cfg: cfg, times: times, whose: controlGroup, started: time.Now(), alarmed: make(map[string]bool), sessions: make(map[string]*session),
		names: make(map[string]*session), served: make(map[string]*served), direct: make(map[string]*bypass),
		departures: cache.NewLRUExpireCache(maxSockets), left: cache.NewLRUExpireCache(maxSockets), changed: make(chan struct{}),
		check: driverCheck{sockets: cfg.Sockets, timeout: times.call, infoDeadline: times.nodeInfo}, due: make(chan struct{}, 1),
	}
	r.node = &nodeCheck{
		registry: r, soon: make(chan struct{}, 1), absent: make(map[string]*absence),
		renewals: flowcontrol.NewBackOff(times.nodeCheck, times.lastRenewal),
	}
	return r
}

// MakeDirs makes the two directories of ours. A configuration whose directories cannot be made is
// refused before the daemon serves anything.
func (c Config) MakeDirs() error {
	for dir, mode := range map[string]fs.FileMode{c.Registry: 0o750, c.Sockets: 0o700} {
		if err := os.MkdirAll(dir, mode); err != nil {
			return volume.Errorf(volume.Internal, "the directory %s cannot be made: %w", dir, err)
		}
	}
	if err := os.Chmod(c.Sockets, 0o700); err != nil { //nolint:gosec // a directory
		return volume.Errorf(volume.Internal, "the directory %s cannot be closed to others: %w", c.Sockets, err)
	}
	return nil
}

// Run follows the two directories until ctx ends. They are compared with what they were at each
// notice of a change, and from time to time: a directory can be removed and made again. The
// sockets stay at the end: kubelet would deregister a driver whose socket goes.
func (r *Registry) Run(ctx context.Context) error {
	if err := r.cfg.MakeDirs(); err != nil {
		return err
	}
	r.notices = map[string]*notice{r.cfg.Registry: newNotice(r.due), r.cfg.KubeletRegistry: newNotice(r.due)}
	ctx, cancel := context.WithCancel(ctx)
	defer r.end(cancel)
	if r.cfg.CSINode != nil {
		r.parts.Go(func() { r.node.run(ctx) })
	}
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-time.After(r.scan(ctx)):
		case <-r.due:
			sys.Sleep(ctx, r.times.gather) // more may follow
		}
	}
	return nil
}

// end lets calls end. Until all have, or Patience has passed, every driver is served: kubelet's calls to
// others must not fail because one takes long.
func (r *Registry) end(cancel context.CancelFunc) {
	cancel()
	r.parts.Wait() // nobody changes what is served any more
	deadline := time.Now().Add(r.cfg.Patience)
	for time.Now().Before(deadline) && r.busy() {
		time.Sleep(r.times.gather)
	}
	for _, one := range r.served {
		r.parts.Go(func() { one.stop(max(time.Until(deadline), r.times.lastCalls)) })
	}
	r.parts.Wait()
	for _, one := range r.notices {
		go one.close()
	}
}

// scan reads the directories, and returns how long that is enough if no change is noticed.
func (r *Registry) scan(ctx context.Context) time.Duration {
	registrars, err := r.list(r.cfg.Registry, false)
	others, othersErr := r.list(r.cfg.KubeletRegistry, true)
	r.logUnread(errors.Join(err, othersErr))
	r.followRegistrars(ctx, registrars)
	r.dropStale(ctx, others.found)
	maps.DeleteFunc(others.found, func(path string, _ socketID) bool { return strings.HasSuffix(path, Suffix) })
	r.followBypass(ctx, others)
	r.reportBypassed()
	if !registrars.watched || !others.watched || len(registrars.found) >= maxSockets || len(others.found) >= maxSockets {
		return r.times.rescan
	}
	if grace := r.cfg.Grace - time.Since(r.started); grace > 0 {
		return min(grace, r.times.watched)
	}
	return r.times.watched
}

// list is socketsIn for a directory in which others make what they want. Where one of them hangs, none of its
// sockets counts as gone.
func (r *Registry) list(dir string, below bool) (*listing, error) {
	found, err := sys.Look(&r.looks, dir, func() (*listing, error) {
		if dir == r.cfg.Registry {
			if err := os.MkdirAll(dir, 0o750); err != nil {
				r.cfg.Log.Error("the registry directory cannot be made again", zap.Error(err))
			}
		}
		return socketsIn(dir, below, r.notices[dir].watch)
	})
	if errors.Is(err, sys.ErrHangs) {
		return &listing{hangs: true}, fmt.Errorf("%s: %w", dir, err)
	}
	return found, err
}

// logUnread logs once why sockets cannot be listed: it may last.
func (r *Registry) logUnread(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != r.unread {
		r.cfg.Log.Warn("some sockets cannot be listed, and do not count as gone", zap.Error(err))
	}
	r.unread = text
}

// maxSockets bounds how many sockets are followed in a directory: a program that can write there could make any number.
const maxSockets = 128
const maxListed = 32 * maxSockets // of a directory and those below it

// followRegistrars starts a session for each new socket of a registrar, and ends those whose socket has gone.
func (r *Registry) followRegistrars(ctx context.Context, now *listing) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, front := range r.served {
		front.repair(&r.cfg)
	}
	for path, one := range r.sessions {
		sys.Wake(one.scanned)
		if now.gone(path, one.id) {
			one.cancel()
			delete(r.sessions, path)
		}
	}
	for path, id := range now.found {
		if r.sessions[path] != nil || len(r.sessions) >= maxSockets && !r.endIdle() {
			continue
		}
		ctx, cancel := context.WithCancel(ctx)
		one := &session{registry: r, socket: path, id: id, begun: time.Now(), cancel: cancel, renew: make(chan struct{}, 1), scanned: make(chan struct{}, 1),
			settling: settling{registry: r}, now: State{Registrar: path, Since: time.Now()}}
		r.sessions[path] = one
		r.parts.Go(func() { one.run(ctx) })
	}
}

// endIdle ends the session of one registrar that had its time and has no driver: others wait for
// the place, and it comes again after them. The caller holds the lock.
func (r *Registry) endIdle() bool {
	for path, one := range r.sessions {
		if time.Since(one.begun) > r.times.untold && !one.state().Ready {
			one.cancel()
			delete(r.sessions, path)
			return true
		}
	}
	return false
}

// gone reports whether a session's registrar has gone, or has made a new socket.
func (r *Registry) gone(s *session) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sessions[s.socket] != s
}

// dropStale removes registrations of an earlier process whose driver has not come back:
// kubelet would call a socket that nobody serves. It holds no lock meanwhile, as the directory may hang.
func (r *Registry) dropStale(ctx context.Context, found map[string]socketID) {
	stale := r.stale(ctx, found)
	_, _ = sys.Look(&r.looks, r.cfg.KubeletRegistry, func() (struct{}, error) {
		for path, id := range stale {
			if idAt(path) == id && os.Remove(path) == nil {
				r.cfg.Log.Info("a registration without its driver was removed", zap.String("socket", path))
			}
		}
		return struct{}{}, nil
	})
}

// stale returns the registrations whose driver has not come back. Once ctx has ended there are none: the names are
// released then because we end.
func (r *Registry) stale(ctx context.Context, found map[string]socketID) map[string]socketID {
	r.mu.Lock()
	defer r.mu.Unlock()
	if ctx.Err() != nil || time.Since(r.started) < r.cfg.Grace {
		return nil
	}
	used := make(map[string]bool, len(r.names))
	for name := range r.names {
		used[registrationPath(r.cfg.KubeletRegistry, name)] = true
	}
	stale := maps.Clone(found)
	maps.DeleteFunc(stale, func(path string, _ socketID) bool {
		return !strings.HasSuffix(path, Suffix) || used[path] || filepath.Dir(path) != filepath.Clean(r.cfg.KubeletRegistry)
	})
	return stale
}

// State is a driver as `crustctl drivers` shows it.
type State struct {
	Driver
	// Registrar is the registrar's socket, and Socket the CSI socket of ours.
	Registrar string
	Socket    string
	Ready     bool // it answers, and kubelet has not refused it
	Problem   string
	Since     time.Time // when Ready changed, or else when the registrar was found
	// Kubelet is the state of the registration with kubelet. Waiting is since when there has been none, or zero.
	Kubelet string
	Waiting time.Time
	// Bypassed is set where kubelet calls the driver directly.
	Bypassed bool
	// Missing is set where the driver is NotInNode.
	Missing bool
}

// Left returns when the name of a driver was last given back, after its registrar went, or when r was made.
func (r *Registry) Left(driver string) time.Time {
	at, _ := r.left.Get(driver)
	if left, known := at.(time.Time); known {
		return left
	}
	return r.started
}

// List returns the state of every registrar, also of refused ones, ordered by driver.
func (r *Registry) List() []State {
	bypassed := r.Bypassed()
	r.mu.Lock()
	sessions := slices.Collect(maps.Values(r.sessions))
	r.mu.Unlock()
	out := make([]State, 0, len(sessions))
	for _, one := range sessions {
		state := one.state()
		_, state.Bypassed = bypassed[state.Name]
		if state.Ready && strings.HasPrefix(state.Kubelet, refusedBy) {
			state.Ready, state.Problem, state.Since = false, "kubelet "+state.Kubelet, cmp.Or(state.Waiting, state.Since)
		}
		state.Missing = state.Ready && r.node.missing(state.Name)
		out = append(out, state)
	}
	slices.SortFunc(out, func(a, b State) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Registrar, b.Registrar))
	})
	return out
}
