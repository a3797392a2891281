package pods

import (
	"context"
	"crypto/sha256"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// What is watched, as errors and metrics name it.
const (
	identity   = "the cluster's identity"
	allPods    = "the pods of this node"
	allClasses = "runtime classes"
	allDrivers = "CSI drivers"
)

// How often a kubeconfig is read again that cannot be used, or whose server does not answer.
const (
	firstRetry = time.Second
	lastRetry  = 30 * time.Second
)

// watchBackoff lets watches recover within twenty seconds after the server is back.
var watchBackoff = wait.Backoff{Duration: 500 * time.Millisecond, Factor: 2, Jitter: 1, Steps: 6, Cap: 10 * time.Second}

// Run watches the cluster until ctx ends. No failure ends it: everything else works without the cluster.
func (c *Cluster) Run(ctx context.Context) error {
	backoff := wait.Backoff{Duration: firstRetry, Factor: 2, Jitter: 0.5, Steps: 10, Cap: lastRetry}
	for ctx.Err() == nil {
		stamp := c.cfg.Identity.Stamp()
		client, err := c.connect()
		if err != nil {
			c.health.failed(identity, false, err)
			c.changes.notify()
			sys.Sleep(ctx, backoff.Step())
			continue
		}
		c.health.good(identity, false)
		backoff.Duration, backoff.Steps = firstRetry, 10
		c.server.client.Store(client)
		c.follow(ctx, client, stamp)
		client.close()
	}
	return nil
}

func (c *Cluster) connect() (*api, error) {
	if c.cfg.NodeName == "" {
		return nil, errors.New("the node's name is not known: set cluster.nodeName")
	}
	config, err := c.cfg.Identity.Config()
	if err != nil {
		return nil, err
	}
	return newAPI(config)
}

// follow watches until ctx ends, or until the kubeconfig has changed while the API server
// could not be reached with the old one.
func (c *Cluster) follow(ctx context.Context, client *api, stamp [sha256.Size]byte) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var parts sync.WaitGroup
	for _, one := range []*cache.Reflector{
		c.reflector(client, c.pods.table.of, c.pods.table),
		c.reflector(client, classKind, c.classes),
		c.reflector(client, driverKind, c.drivers),
	} {
		parts.Go(func() { one.RunWithContext(klog.NewContext(ctx, logr.Discard())) })
	}
	parts.Go(func() { c.prefetch.run(ctx) })
	ticker := time.NewTicker(c.recheck)
	defer ticker.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-ticker.C:
			if c.Problem() != nil && c.cfg.Identity.Stamp() != stamp {
				cancel()
			}
		}
	}
	parts.Wait()
}

// reflector keeps a table up to date. Its lists and watches report the health of the contact.
func (c *Cluster) reflector(client *api, of kind, into cache.ReflectorStore) *cache.Reflector {
	source := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			found, err := client.list(ctx, of, options)
			c.heard(ctx, of.what, false, err)
			return found, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			found, err := client.watch(ctx, of, options)
			c.heard(ctx, of.what, true, err)
			return found, err
		},
	}
	quiet, backoff := logr.Discard(), c.backoff
	return cache.NewReflectorWithOptions(source, of.example, into, cache.ReflectorOptions{Name: of.what, Logger: &quiet, Backoff: &backoff})
}

// heard records the outcome of a list or a watch.
func (c *Cluster) heard(ctx context.Context, what string, watched bool, err error) {
	switch {
	case err == nil:
		c.health.good(what, watched)
	case ctx.Err() != nil, apierrors.IsResourceExpired(err), apierrors.IsGone(err), apierrors.IsInvalid(err):
		// We stop, or the watch starts again from a new list.
	default:
		c.health.failed(what, watched, c.server.explain(err))
		c.changes.notify()
	}
}

// watchHealth is the health of the watches. A single failed get says nothing about it.
type watchHealth struct {
	mu   sync.Mutex
	last time.Time // when the API server last answered
	bad  map[string]failure
	log  *zap.Logger
}

func newWatchHealth(log *zap.Logger) *watchHealth {
	return &watchHealth{bad: make(map[string]failure), log: log}
}

// failure is what is wrong with one watch, and since when.
type failure struct {
	err     error
	since   time.Time
	watched bool // a watch has failed, and lists may work
}

// good records that a watch, or reading the kubeconfig, works. Only a watch ends a failure of a watch.
func (h *watchHealth) good(what string, watched bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last = time.Now()
	if was, there := h.bad[what]; there && (watched || !was.watched) {
		delete(h.bad, what)
		h.log.Info("followed again", zap.String("what", what), zap.Duration("after", time.Since(was.since)))
	}
}

// failed records that a watch does not work. Only the first failure is logged: a server
// that is away for an hour is one event.
func (h *watchHealth) failed(what string, watched bool, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	was, there := h.bad[what]
	if !there {
		was.since = time.Now()
		h.log.Warn("cannot be followed", zap.String("what", what), zap.Error(err))
	}
	was.watched = was.watched || watched
	was.err = volume.Errorf(volume.Timeout, "%s cannot be followed since %s: %w", what, was.since.UTC().Format(time.RFC3339), err)
	h.bad[what] = was
}

// problem is the first problem of some watches, or nil.
func (h *watchHealth) problem(whats ...string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, what := range whats {
		if bad, there := h.bad[what]; there {
			return bad.err
		}
	}
	return nil
}

// state lists all problems, and returns when the API server last answered.
func (h *watchHealth) state() (problems []string, last time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return sys.Map(slices.Sorted(maps.Keys(h.bad)), func(what string) string { return h.bad[what].err.Error() }), h.last
}
