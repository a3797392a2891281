// Package registry stands between the registrars of CSI drivers and kubelet. For
// registrars it plays kubelet's part: they register in a directory of ours. For
// kubelet it registers each driver under the driver's own name, with a CSI socket
// of ours.
package registry

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/util/cache"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Suffix ends the names of our registration sockets. It differs from what
// node-driver-registrar makes, so that both can be told apart.
const Suffix = ".crust-proxy-reg.sock"

// Config is what a Registry is made of.
type Config struct {
	// Registry is where registrars make their sockets. It lies outside kubelet's,
	// whose watcher looks into sub-directories too.
	Registry string
	// KubeletRegistry is where kubelet looks for ours.
	KubeletRegistry string
	// Sockets holds the CSI sockets, and is closed to all but root.
	Sockets string
	// Grace is how long after the start a registration of an earlier life waits
	// for its driver before it is taken away.
	Grace time.Duration
	// Patience tells how long calls under way may take to end when Run ends.
	Patience func() time.Duration
	Log      *zap.Logger
	// Serve gives the options of the gRPC server that stands in for a driver.
	Serve func(name string, driver grpc.ClientConnInterface) []grpc.ServerOption
	// Self is the pid of this daemon, by which an endpoint that leads back to it is
	// told; 0 is not to look.
	Self int
	// Deferred names the deferred volumes of a driver that live on this node. It must not
	// block.
	Deferred func(driver string) []string
	// Alarm is told when a driver registers with kubelet past us, and when that is
	// over.
	Alarm func(driver string, on bool)
	// Renewed is told when a registration that kubelet may have lost is renewed; it
	// may be nil.
	Renewed func(driver string)
	// NodeDrivers reads the drivers in the node's CSINode. It may be nil, where nobody
	// can be asked; then a registration that kubelet loses late is not noticed.
	NodeDrivers func(ctx context.Context) (map[string]bool, error)
	// Times are the waits; those that are zero are the usual ones.
	Times Times
}

// Registry follows registrars, drivers and kubelet.
type Registry struct {
	cfg     Config
	times   Times
	started time.Time
	alarmed map[string]bool // the drivers of which Alarm was told; of Run alone
	unread  string          // why sockets could not be listed the last time; of Run alone

	mu       sync.Mutex
	sessions map[string]*session // by the registrar's socket
	names    map[string]*session // who has a driver's name
	served   map[string]*served  // the CSI sockets, by driver
	direct   map[string]*bypass  // sockets of others in kubelet's directory
	changed  chan struct{}       // closed when a name came free

	check      driverCheck
	departures *cache.LRUExpireCache // drivers of which a socket of others went lately from kubelet's directory
	node       *nodeCheck

	parts sync.WaitGroup
}

// New makes a registry; nothing happens before Run.
func New(cfg Config) *Registry {
	r := &Registry{
		cfg: cfg, times: cfg.Times.orUsual(), alarmed: make(map[string]bool), sessions: make(map[string]*session), names: make(map[string]*session),
		served: make(map[string]*served), direct: make(map[string]*bypass),
		departures: cache.NewLRUExpireCache(maxSockets), changed: make(chan struct{}),
	}
	r.check = driverCheck{sockets: cfg.Sockets, timeout: r.times.Call}
	r.node = &nodeCheck{registry: r, soon: make(chan struct{}, 1), absent: make(absences)}
	return r
}

// Run follows the two directories until ctx ends. The sockets stay when it ends:
// kubelet would take a driver from the node if they went, and comes back to them
// when we do.
func (r *Registry) Run(ctx context.Context) error {
	r.started = time.Now()
	for dir, mode := range map[string]fs.FileMode{r.cfg.Registry: 0o750, r.cfg.Sockets: 0o700} {
		if err := os.MkdirAll(dir, mode); err != nil {
			return volume.Errorf(volume.Internal, "the directory %s cannot be made: %w", dir, err)
		}
	}
	if err := os.Chmod(r.cfg.Sockets, 0o700); err != nil { //nolint:gosec // a directory
		return volume.Errorf(volume.Internal, "the directory %s cannot be closed to others: %w", r.cfg.Sockets, err)
	}
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return volume.Errorf(volume.Internal, "directories cannot be watched: %w", err)
	}
	defer func() { _ = watcher.Close() }()
	ctx, cancel := context.WithCancel(ctx)
	defer r.end(cancel)
	if r.cfg.NodeDrivers != nil {
		r.parts.Go(func() { r.node.run(ctx) })
	}
	r.follow(ctx, watcher)
	return nil
}

func (r *Registry) end(cancel context.CancelFunc) {
	cancel()
	r.parts.Wait()
	r.mu.Lock()
	for _, one := range r.served {
		r.parts.Go(func() { one.stop(r.cfg.Patience()) })
	}
	r.mu.Unlock()
	r.parts.Wait()
}

// follow looks at both directories whenever something happens there, and now and
// then: a directory can be removed and made again, and events be lost.
func (r *Registry) follow(ctx context.Context, watcher *fsnotify.Watcher) {
	tick := time.NewTicker(r.times.Rescan)
	defer tick.Stop()
	for {
		for _, dir := range []string{r.cfg.Registry, r.cfg.KubeletRegistry} {
			_ = watcher.Add(dir) // one that is missing is watched when it is there
		}
		r.look(ctx)
		select {
		case <-ctx.Done():
			return
		case <-watcher.Events:
		case err := <-watcher.Errors:
			r.cfg.Log.Debug("events may have been lost", zap.Error(err)) // they are looked for anyway
		case <-tick.C:
		}
	}
}

func (r *Registry) look(ctx context.Context) {
	if err := os.MkdirAll(r.cfg.Registry, 0o750); err != nil {
		r.cfg.Log.Error("the registry directory cannot be made again", zap.Error(err))
	}
	registrars, err := socketsIn(r.cfg.Registry, false)
	others, othersErr := socketsIn(r.cfg.KubeletRegistry, true)
	r.logUnread(errors.Join(err, othersErr))
	r.followRegistrars(ctx, registrars)
	r.dropStale(ctx, others.found)
	maps.DeleteFunc(others.found, func(path string, _ socketID) bool { return strings.HasSuffix(path, Suffix) })
	r.followBypass(ctx, others)
	r.tellAlarms()
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

// maxSockets bounds how many sockets are followed in a directory: whoever can write
// there could make any number.
const maxSockets = 128

// followRegistrars has one session for each registrar's socket.
func (r *Registry) followRegistrars(ctx context.Context, now *listing) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for path, one := range r.sessions {
		if now.gone(path, one.id) {
			one.cancel()
			delete(r.sessions, path)
		}
	}
	for path, id := range now.found {
		if r.sessions[path] != nil || len(r.sessions) >= maxSockets {
			continue
		}
		ctx, cancel := context.WithCancel(ctx)
		one := &session{registry: r, socket: path, id: id, cancel: cancel, renew: make(chan struct{}, 1),
			settling: settling{registry: r}, now: State{Registrar: path, Since: time.Now()}}
		r.sessions[path] = one
		r.parts.Go(func() { one.run(ctx) })
	}
}

// gone tells that a session's registrar has gone, or made its socket anew.
func (r *Registry) gone(s *session) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sessions[s.socket] != s
}

// dropStale removes registrations of an earlier life whose driver has not come:
// kubelet would call a socket that nobody serves. When ctx has ended, the drivers' names
// are free because we end, and what is there stays.
func (r *Registry) dropStale(ctx context.Context, found map[string]socketID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if ctx.Err() != nil || time.Since(r.started) < r.cfg.Grace {
		return
	}
	used := make(map[string]bool, len(r.names))
	for name := range r.names {
		used[registrationPath(r.cfg.KubeletRegistry, name)] = true
	}
	for path := range found {
		if !strings.HasSuffix(path, Suffix) || used[path] {
			continue
		}
		if err := os.Remove(path); err == nil {
			r.cfg.Log.Info("a registration without its driver was removed", zap.String("socket", path))
		}
	}
}

// State is a driver as `crustctl drivers` shows it.
type State struct {
	Driver
	// Registrar is the registrar's socket, and Socket the CSI socket of ours.
	Registrar string
	Socket    string
	Ready     bool
	Problem   string
	Since     time.Time
	// Kubelet is kubelet's word.
	Kubelet string
	// Bypassed is set where the driver talks to kubelet past us.
	Bypassed bool
	// Missing is set where the driver is NotInNode.
	Missing bool
}

// List tells of every registrar, by the driver's name; also of those that are
// refused.
func (r *Registry) List() []State {
	bypassed := r.Bypassed()
	r.mu.Lock()
	sessions := slices.Collect(maps.Values(r.sessions))
	r.mu.Unlock()
	out := make([]State, 0, len(sessions))
	for _, one := range sessions {
		state := one.state()
		_, state.Bypassed = bypassed[state.Name]
		state.Missing = state.Ready && r.node.missing(state.Name)
		out = append(out, state)
	}
	slices.SortFunc(out, func(a, b State) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Registrar, b.Registrar))
	})
	return out
}
