package daemon

import (
	"time"

	"go.uber.org/zap"
	"k8s.io/klog/v2"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	csifront "github.com/crust-proxy/crust-proxy/internal/front/csi"
	"github.com/crust-proxy/crust-proxy/internal/front/pods"
	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
)

// newCluster returns the lookup of the node's pods, or nil if no cluster is configured.
func newCluster(cfg *config.Config, metrics *telemetry.Metrics, log *zap.Logger) (*pods.Cluster, error) {
	if !cfg.Cluster.On() || !cfg.Front.Enabled {
		return nil, nil
	}
	identity, name, err := clusterOf(cfg)
	if err != nil {
		return nil, err
	}
	klog.SetLogger(telemetry.Logr(log)) // client-go logs through it
	return pods.New(pods.Config{
		Identity: identity, NodeName: name, Log: log,
		Asked: func(question string, took time.Duration, err error) {
			metrics.PodLookedUp(question, resultOf(err), took)
		},
	}), nil
}

func clusterOf(cfg *config.Config) (apiserver.Identity, string, error) {
	identity := apiserver.Identity{
		Kubeconfig: cfg.Cluster.Kubeconfig, InCluster: cfg.Cluster.InCluster, UserAgent: "crust-proxy/" + sys.Version(),
	}
	if cfg.Cluster.NodeName != "" {
		return identity, cfg.Cluster.NodeName, nil
	}
	name, err := apiserver.NodeName()
	return identity, name, err
}

// podSource returns the front's source of pods: without a cluster a nil interface, not an
// interface around a nil pointer.
func podSource(cluster *pods.Cluster) csifront.Pods {
	if cluster == nil {
		return nil
	}
	return cluster
}
