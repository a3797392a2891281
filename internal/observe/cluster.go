package observe

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// ClusterState is how the look-up of pods stands.
type ClusterState struct {
	// LastHeard is when the API server was last heard of; zero is never.
	LastHeard time.Time
	// Pods are those known, Incomplete those of them of which a volume is not.
	Pods, Incomplete int
}

// clusterMetrics are there only where a cluster is asked.
type clusterMetrics struct {
	lookups *prometheus.HistogramVec
	state   func() ClusterState

	heard, pods, incomplete *prometheus.Desc
}

// WatchCluster makes the metrics of the look-up of pods, and gives what times each
// question; result is "ok" or an error's kind.
func (m *Metrics) WatchCluster(state func() ClusterState) (asked func(question, result string, took time.Duration), err error) {
	desc := func(name, help string) *prometheus.Desc { return prometheus.NewDesc(name, help, nil, nil) }
	c := &clusterMetrics{
		state: state,
		lookups: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "crust_proxy_pod_lookup_duration_seconds", Help: "Time taken to tell of a pod, or of the pods that want a volume.",
			Buckets: buckets,
		}, []string{"question", "result"}),
		heard: desc("crust_proxy_cluster_last_heard_timestamp_seconds", "When the API server was last heard of; 0 is never."),
		pods:  desc("crust_proxy_cluster_pods", "Pods of this node that are known."),
		incomplete: desc("crust_proxy_cluster_pods_incomplete",
			"Pods of this node of which it is not known who gives one of their volumes."),
	}
	err = errors.Join(m.Registry.Register(c.lookups), m.Registry.Register(c))
	return func(question, result string, took time.Duration) {
		c.lookups.WithLabelValues(question, result).Observe(took.Seconds())
	}, err
}

// Describe is for the registry.
func (c *clusterMetrics) Describe(out chan<- *prometheus.Desc) {
	out <- c.heard
	out <- c.pods
	out <- c.incomplete
}

// Collect is for the registry.
func (c *clusterMetrics) Collect(out chan<- prometheus.Metric) {
	now := c.state()
	heard := 0.0
	if !now.LastHeard.IsZero() {
		heard = float64(now.LastHeard.UnixMilli()) / 1000
	}
	for desc, value := range map[*prometheus.Desc]float64{c.heard: heard, c.pods: float64(now.Pods), c.incomplete: float64(now.Incomplete)} {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value)
	}
}
