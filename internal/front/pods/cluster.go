// Package pods looks up the pods of this node in the Kubernetes API: which runtime handler a pod gets, which
// CSI volumes it has, and how its containers use them. It needs no more rights than kubelet's own identity
// has: it watches the pods of this node, runtime classes and CSI drivers, and gets the claims and volumes of
// those pods, and this node's CSINode. What is known is answered from memory, even while the API server is
// away. What is not known is an error, never a guess.
package pods

import (
	"cmp"
	"context"
	"errors"
	"time"

	"go.uber.org/zap"
	nodev1 "k8s.io/api/node/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/flowcontrol"

	csifront "github.com/crust-proxy/crust-proxy/internal/front/csi"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
)

// The front asks a Cluster.
var _ csifront.Pods = (*Cluster)(nil)

// patience is how long a lookup waits for what is not known yet: kubelet may learn of a pod a moment before we do.
const patience = 2 * time.Second

// Config is what a Cluster is made of.
type Config struct {
	// Identity is how and as whom the API server is asked.
	Identity apiserver.Identity
	// NodeName is this node's, as in NodeName().
	NodeName string
	// Patience is how long a lookup waits for what is not known yet; 0 is two seconds.
	Patience time.Duration
	// Asked is called after each lookup; it may be nil.
	Asked func(question string, took time.Duration, err error)
	Log   *zap.Logger
}

// Cluster knows the pods of this node while it runs.
type Cluster struct {
	cfg      Config
	changes  *notifier
	health   *watchHealth
	csiNode  *watchHealth // how the last get of the CSINode went
	pods     *pods
	classes  *table[string] // the handlers of runtime classes
	drivers  *table[string] // the fsGroupPolicies of CSI drivers
	server   *server
	resolver *resolver
	prefetch *prefetcher
	// recheck is how often the kubeconfig is compared while its server does not answer.
	recheck time.Duration
	// backoff is the time between two attempts to watch.
	backoff wait.Backoff
}

// New returns a Cluster, which knows nothing until it runs.
func New(cfg Config) *Cluster {
	cfg.Patience = cmp.Or(cfg.Patience, patience)
	if cfg.Asked == nil {
		cfg.Asked = func(string, time.Duration, error) {}
	}
	changes, health, server := &notifier{}, newWatchHealth(cfg.Log), &server{node: cfg.NodeName}
	pods := newPods(cfg.NodeName, health, changes)
	resolver := &resolver{pods: pods, server: server, slots: make(chan struct{}, getsAtOnce), missing: newRetries(missingFirst, missingLast)}
	prefetch := &prefetcher{
		pods: pods, resolver: resolver, tried: newRetries(prefetchFirst, prefetchLast),
		rate: flowcontrol.NewTokenBucketRateLimiter(prefetchRate, prefetchBurst), spread: prefetchSpread,
	}
	return &Cluster{
		cfg: cfg, changes: changes, health: health, csiNode: newWatchHealth(cfg.Log), server: server,
		pods: pods, classes: newTable(classKind, health, changes, attributeOf, nil), drivers: newTable(driverKind, health, changes, attributeOf, nil),
		resolver: resolver, prefetch: prefetch, recheck: lastRetry, backoff: watchBackoff,
	}
}

func attributeOf(object any) (name, value string) {
	switch object := object.(type) {
	case *nodev1.RuntimeClass:
		return object.Name, object.Handler
	case *storagev1.CSIDriver:
		if object.Spec.FSGroupPolicy != nil {
			value = string(*object.Spec.FSGroupPolicy)
		}
		return object.Name, value
	}
	return "", ""
}

// ByUID returns the pod that a volume is published for.
func (c *Cluster) ByUID(ctx context.Context, uid string) (decision.Pod, error) {
	start := time.Now()
	pod, err := c.byUID(ctx, uid)
	c.cfg.Asked("pod", time.Since(start), err)
	return pod, err
}

// Using returns the pods of this node that use a volume, the oldest first. A pod that is being deleted is returned only
// if no other pod uses the volume: its containers may still run. Pods that have ended use nothing.
func (c *Cluster) Using(ctx context.Context, driver, volumeID string) ([]decision.Pod, error) {
	start := time.Now()
	found, err := c.using(ctx, source{driver: driver, id: volumeID})
	c.cfg.Asked("volume", time.Since(start), err)
	return found, err
}

const ownCSINode = "the CSINode of this node"

// NodeDrivers reads the CSI drivers that kubelet has entered in this node's CSINode. A node's identity may
// get its own CSINode and not watch it, so each call asks the API server. A CSINode that does not exist is an
// error: kubelet makes it when it starts, so the node's name may be wrong.
func (c *Cluster) NodeDrivers(ctx context.Context) (map[string]bool, error) {
	ctx, cancel := context.WithTimeout(ctx, getTime)
	defer cancel()
	found := &storagev1.CSINode{}
	if err := c.server.get(ctx, "the CSINode "+c.cfg.NodeName, storageGroup, "csinodes", "", c.cfg.NodeName, found); err != nil {
		if !errors.Is(ctx.Err(), context.Canceled) {
			c.csiNode.failed(ownCSINode, false, err)
		}
		return nil, err
	}
	c.csiNode.good(ownCSINode, false)
	drivers := make(map[string]bool)
	for _, one := range found.Spec.Drivers {
		drivers[one.Name] = true
	}
	return drivers, nil
}
