package daemon

import (
	"time"

	"k8s.io/klog/v2"

	"github.com/crust-proxy/crust-proxy/internal/cluster"
	"github.com/crust-proxy/crust-proxy/internal/config"
	"github.com/crust-proxy/crust-proxy/internal/observe"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/front"
)

// buildCluster makes what tells of the node's pods, where a cluster is named.
func (d *daemon) buildCluster(cfg *config.Config) error {
	if !cfg.Cluster.On() || !cfg.Front.Enabled {
		return nil
	}
	identity, name, err := clusterOf(cfg)
	if err != nil {
		return err
	}
	asked, err := d.metrics.WatchCluster(func() observe.ClusterState {
		state := d.cluster.State()
		return observe.ClusterState{LastHeard: state.LastHeard, Pods: state.Pods, Incomplete: state.Incomplete}
	})
	if err != nil {
		return err
	}
	log := d.log.Named("cluster")
	klog.SetLogger(observe.Logr(log)) // client-go speaks through it
	d.cluster = cluster.New(cluster.Config{
		Identity: identity, NodeName: name, Log: log,
		Asked: func(question string, took time.Duration, err error) {
			result := "ok"
			if err != nil {
				result = deferral.KindOf(err).String()
			}
			asked(question, result, took)
		},
	})
	return nil
}

// clusterOf gives the identity by which the cluster is asked, and this node's name
// there.
func clusterOf(cfg *config.Config) (cluster.Identity, string, error) {
	identity := cluster.Identity{
		Kubeconfig: cfg.Cluster.Kubeconfig, InCluster: cfg.Cluster.InCluster, UserAgent: "crust-proxy/" + Version(),
	}
	if cfg.Cluster.NodeName != "" {
		return identity, cfg.Cluster.NodeName, nil
	}
	name, err := cluster.NodeName()
	return identity, name, err
}

// pods is the source for the front: no interface around nothing where no cluster is
// asked.
func (d *daemon) pods() front.Pods {
	if d.cluster == nil {
		return nil
	}
	return d.cluster
}

// clusterFindings are what is wrong with the look-up.
func (d *daemon) clusterFindings() []string {
	if d.cluster == nil {
		return nil
	}
	var out []string
	for _, problem := range d.cluster.State().Problems {
		out = append(out, "pods cannot be looked up: "+problem+": volumes of pods that are not known yet are refused")
	}
	return out
}
