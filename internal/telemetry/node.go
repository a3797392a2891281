package telemetry

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// NodeState is how the parts of the daemon stand, as `crustctl doctor` tells it in
// words.
type NodeState struct {
	// ConfigGood is false while a changed file is bad, and what was in force
	// before it stays.
	ConfigGood bool
	// BadRecords counts the records that cannot be used.
	BadRecords int
	// Sources are what is followed outside of the daemon, such as "sandboxes", and
	// whether each can be followed now.
	Sources map[string]bool
	// Handlers are the runtime handlers, and whether each can work.
	Handlers map[string]bool
	// Drivers are those behind the front, and whether each is ready.
	Drivers map[string]bool
	// Missing are those of them that are registered with kubelet and not in the
	// node's CSINode.
	Missing map[string]bool
	// Abnormal counts the volumes whose sandbox last said that their filesystem
	// is not as it should be; State is not used.
	Abnormal []VolumeCount
	// GroupIgnored counts those whose sandbox ignores their group, likewise.
	GroupIgnored []VolumeCount
	// Held counts the devices that a process keeps from being released or claimed.
	Held int
}

// WatchNode makes the metrics of the node's state ask state at each scrape.
func (m *Metrics) WatchNode(state func() NodeState) error {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	return m.Registry.Register(&nodeCollector{
		state: state, drivers: &m.drivers,
		config:  desc("crust_proxy_config_last_reload_successful", "1 unless the configuration file was changed into a bad one."),
		records: desc("crust_proxy_records_unusable", "Records of volumes that cannot be used."),
		source:  desc("crust_proxy_source_synced", "1 while a source outside of the daemon can be followed.", "source"),
		handler: desc("crust_proxy_handler_healthy", "1 while a runtime handler can work.", "handler"),
		driver:  desc("crust_proxy_driver_ready", "1 while a CSI driver behind the front is ready.", "driver"),
		missing: desc("crust_proxy_driver_missing_in_csinode",
			"1 while a CSI driver behind the front is registered with kubelet and not in the node's CSINode.", "driver"),
		abnormal: desc("crust_proxy_volumes_abnormal", "Volumes whose sandbox says that their filesystem is not as it should be.", "driver", "handler"),
		groupless: desc("crust_proxy_volumes_group_ignored",
			"Volumes whose sandbox ignores fsGroup, and that the group is not known to be able to write.", "driver", "handler"),
		held: desc("crust_proxy_devices_held", "Devices to be released or claimed, or released by force, that some process still has open."),
	})
}

type nodeCollector struct {
	state   func() NodeState
	drivers *drivers

	config, records, source, handler, driver, missing, abnormal, groupless, held *prometheus.Desc
}

// Describe is for the registry.
func (c *nodeCollector) Describe(out chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{c.config, c.records, c.source, c.handler, c.driver, c.missing, c.abnormal, c.groupless, c.held} {
		out <- desc
	}
}

// Collect is for the registry.
func (c *nodeCollector) Collect(out chan<- prometheus.Metric) {
	now := c.state()
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	gauge(c.config, one(now.ConfigGood))
	gauge(c.records, float64(now.BadRecords))
	gauge(c.held, float64(now.Held))
	for name, synced := range now.Sources {
		gauge(c.source, one(synced), name)
	}
	for name, healthy := range now.Handlers {
		gauge(c.handler, one(healthy), name)
	}
	c.collectDrivers(now, gauge)
}

// collectDrivers adds up what has one label, for names over the bound share one.
func (c *nodeCollector) collectDrivers(now NodeState, gauge func(*prometheus.Desc, float64, ...string)) {
	ready := make(map[string]bool)
	for name, is := range now.Drivers {
		label := c.drivers.label(name)
		before, known := ready[label]
		ready[label] = is && (before || !known)
	}
	for label, is := range ready {
		gauge(c.driver, one(is), label)
	}
	missing := make(map[string]bool)
	for name, is := range now.Missing {
		if label := c.drivers.label(name); is && !missing[label] {
			missing[label] = true
			gauge(c.missing, 1, label)
		}
	}
	for desc, counts := range map[*prometheus.Desc][]VolumeCount{c.abnormal: now.Abnormal, c.groupless: now.GroupIgnored} {
		sums := make(map[[2]string]int)
		for _, v := range counts {
			sums[[2]string{c.drivers.label(v.Driver), v.Handler}] += v.Count
		}
		for labels, n := range sums {
			gauge(desc, float64(n), labels[0], labels[1])
		}
	}
}

func one(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

// VolumeCount is how many volumes stand where.
type VolumeCount struct {
	State, Driver, Handler string
	Count                  int
}

// CountVolumes makes crust_proxy_volumes ask count at each scrape.
func (m *Metrics) CountVolumes(count func() []VolumeCount) error {
	return m.Registry.Register(&volumeCollector{
		count: count, drivers: &m.drivers,
		desc: prometheus.NewDesc("crust_proxy_volumes", "Volumes, by state.", []string{"state", "driver", "handler"}, nil),
	})
}

type volumeCollector struct {
	count   func() []VolumeCount
	drivers *drivers
	desc    *prometheus.Desc
}

// Describe is for the registry.
func (c *volumeCollector) Describe(out chan<- *prometheus.Desc) { out <- c.desc }

// Collect is for the registry.
func (c *volumeCollector) Collect(out chan<- prometheus.Metric) {
	sums := make(map[[3]string]int)
	for _, v := range c.count() {
		sums[[3]string{v.State, c.drivers.label(v.Driver), v.Handler}] += v.Count
	}
	for labels, n := range sums {
		out <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(n), labels[0], labels[1], labels[2])
	}
}

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
