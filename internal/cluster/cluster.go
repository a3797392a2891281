// Package cluster tells of the pods of this node by the Kubernetes API: which
// runtime handler a pod gets, which CSI volumes it has, and what its containers do
// with them. It needs no more rights than kubelet's own identity has: it watches the
// pods of this node, runtime classes and CSI drivers, and gets the claims and the
// volumes of those pods. What is known is answered from memory, whether the API
// server is there or not; what is not known is an error, never a guess.
package cluster

import (
	"context"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sync/singleflight"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/front"
)

// The front's question is answered here.
var _ front.Pods = (*Cluster)(nil)

// patience is how long a question waits for what is not known yet: kubelet may
// learn of a pod a moment before we do.
const patience = 2 * time.Second

// Config is what a Cluster is made of.
type Config struct {
	// Identity says as whom the API server is asked.
	Identity Identity
	// NodeName is this node's, as in NodeName().
	NodeName string
	// Patience is how long a question waits for what is not known yet; 0 is two
	// seconds.
	Patience time.Duration
	// Asked is told of each question; it may be nil.
	Asked func(question string, took time.Duration, err error)
	Log   *zap.Logger
}

// Cluster knows the pods of this node while it runs.
type Cluster struct {
	cfg     Config
	news    news
	contact contact
	pods    pods
	classes table // of runtime classes: their handlers
	drivers table // of CSI drivers: their fsGroupPolicy
	api     atomic.Pointer[api]
	gets    singleflight.Group
	ahead   ahead
	// recheck is how often a kubeconfig is looked at whose server does not answer.
	recheck time.Duration
	// backoff is between the tries of a watch.
	backoff wait.Backoff
	log     *zap.Logger
}

// New makes a Cluster, which knows nothing before it runs.
func New(cfg Config) *Cluster {
	if cfg.Patience == 0 {
		cfg.Patience = patience
	}
	if cfg.Asked == nil {
		cfg.Asked = func(string, time.Duration, error) {}
	}
	c := &Cluster{cfg: cfg, recheck: lastRetry, backoff: watchBackoff, log: cfg.Log}
	c.contact.log = cfg.Log
	c.ahead.c = c
	c.pods.node, c.pods.changed = cfg.NodeName, c.news.tell
	c.classes.changed, c.drivers.changed = c.news.tell, c.news.tell
	return c
}

// NodeName is what kubelet names this node unless it is told otherwise.
func NodeName() (string, error) {
	name, err := os.Hostname()
	name = strings.ToLower(strings.TrimSpace(name))
	if err != nil || name == "" {
		return "", deferral.Errorf(deferral.Internal, "the node's name cannot be told from its host name (%q): set "+
			"cluster.nodeName: %w", name, err)
	}
	return name, nil
}

// ByUID gives the pod that a volume is published for.
func (c *Cluster) ByUID(ctx context.Context, uid string) (front.Pod, error) {
	start := time.Now()
	pod, err := c.byUID(ctx, uid)
	c.cfg.Asked("pod", time.Since(start), err)
	return pod, err
}

// Using gives the pods of this node that want a volume, those first that were made
// first. Pods that are being deleted are given only where no other wants it: until
// they are gone their containers may use it. Pods that have ended want nothing.
func (c *Cluster) Using(ctx context.Context, driver, volumeID string) ([]front.Pod, error) {
	start := time.Now()
	found, err := c.using(ctx, source{driver: driver, id: volumeID})
	c.cfg.Asked("volume", time.Since(start), err)
	return found, err
}
