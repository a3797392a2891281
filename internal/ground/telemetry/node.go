package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// NodeState is the state of the daemon's parts. `crustctl doctor` shows the same in words.
type NodeState struct {
	// ConfigBadSince is since when the configuration file is bad, and an earlier configuration in
	// force; zero is a good file.
	ConfigBadSince time.Time
	// BadRecords counts the records that cannot be used.
	BadRecords int
	// Sources are what the daemon follows outside of itself, such as "sandboxes", and whether
	// it can do so now. Handlers are the runtime handlers, and whether each is healthy.
	Sources, Handlers map[string]bool
	// Drivers are those behind the front, and whether each is ready. Missing are those that are
	// registered with kubelet and missing in the node's CSINode.
	Drivers, Missing map[string]bool
	// Cluster is nil if no cluster is configured.
	Cluster *ClusterState
	// Volumes counts all volumes, Abnormal those whose sandbox last reported an abnormal
	// condition, and GroupIgnored those whose sandbox ignores their group.
	Volumes, Abnormal, GroupIgnored []VolumeCount
	// Staged counts the devices that are staged through the front and have no volume on record.
	Staged []VolumeCount
	// Held counts the devices that somebody keeps from being released or claimed.
	Held int
	// Errors and Warnings count what is wrong on the node, in the parts above and in others.
	Errors, Warnings int
	// Proof is how it is proven that nobody has a device open.
	Proof string
}

// ClusterState is the state of the lookup of pods.
type ClusterState struct {
	LastHeard time.Time // when the API server last answered; zero is never
	// Pods counts the known pods, Incomplete those of them with a volume whose CSI driver is not known yet.
	Pods, Incomplete int
}

// VolumeCount is a number of volumes with the same labels. Only NodeState.Volumes has states.
type VolumeCount struct {
	State, Driver, Handler string
	Count                  int
}

// gauges is a collector that computes its values at each scrape.
type gauges struct {
	descs   []*prometheus.Desc
	collect func(set setGauge)
}

type setGauge func(desc *prometheus.Desc, value float64, labels ...string)

func (g *gauges) desc(name, help string, labels ...string) *prometheus.Desc {
	desc := prometheus.NewDesc(name, help, labels, nil)
	g.descs = append(g.descs, desc)
	return desc
}

// Describe implements prometheus.Collector.
func (g *gauges) Describe(out chan<- *prometheus.Desc) {
	for _, desc := range g.descs {
		out <- desc
	}
}

// Collect implements prometheus.Collector.
func (g *gauges) Collect(out chan<- prometheus.Metric) {
	g.collect(func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	})
}

// WatchNode registers the metrics of the node's state, which call state at each scrape.
func (m *Metrics) WatchNode(state func() NodeState) {
	g := &gauges{}
	config := g.desc("crust_proxy_config_last_reload_successful", "1 unless the configuration file is bad, and an earlier configuration in force.")
	configBad := g.desc("crust_proxy_config_bad_since_timestamp_seconds", "Since when the configuration file is bad; 0 while it is good.")
	records := g.desc("crust_proxy_records_unusable", "Records of volumes that cannot be used.")
	held := g.desc("crust_proxy_devices_held",
		"Devices to be released or claimed, or released by force, that somebody still has open.")
	proof := g.desc("crust_proxy_devices_proof",
		"1 for how it is proven that nobody has a device open: by the kernel's count, or by a scan of all descriptors.", "method")
	staged := g.desc("crust_proxy_devices_staged", "Devices that are staged through the front, and have no volume on record.", "driver")
	findings := g.desc("crust_proxy_findings", "What the daemon knows to be wrong on the node.", "severity")
	source := g.desc("crust_proxy_source_synced", "1 while a source outside of the daemon can be followed.", "source")
	handler := g.desc("crust_proxy_handler_healthy", "1 while a runtime handler can work.", "handler")
	driver := g.desc("crust_proxy_driver_ready", "1 while a CSI driver behind the front is ready.", "driver")
	missing := g.desc("crust_proxy_driver_missing_in_csinode",
		"1 while a CSI driver behind the front is registered with kubelet and not in the node's CSINode.", "driver")
	abnormal := g.desc("crust_proxy_volumes_abnormal",
		"Volumes whose sandbox says that their filesystem is not as it should be.", "driver", "handler")
	groupless := g.desc("crust_proxy_volumes_group_ignored",
		"Volumes whose sandbox ignores fsGroup, and that the group is not known to be able to write.", "driver", "handler")
	volumes := g.desc("crust_proxy_volumes", "Volumes, by state.", "state", "driver", "handler")
	heard := g.desc("crust_proxy_cluster_last_heard_timestamp_seconds", "When the API server last answered; 0 is never.")
	pods := g.desc("crust_proxy_cluster_pods", "Pods of this node that are known.")
	incomplete := g.desc("crust_proxy_cluster_pods_incomplete",
		"Pods of this node with at least one volume whose CSI driver is not known yet.")
	g.collect = func(set setGauge) {
		now := state()
		set(config, one(now.ConfigBadSince.IsZero()))
		set(configBad, seconds(now.ConfigBadSince))
		set(records, float64(now.BadRecords))
		set(held, float64(now.Held))
		set(proof, 1, now.Proof)
		set(findings, float64(now.Errors), "error")
		set(findings, float64(now.Warnings), "warning")
		for desc, states := range map[*prometheus.Desc]map[string]bool{source: now.Sources, handler: now.Handlers} {
			for name, good := range states {
				set(desc, one(good), name)
			}
		}
		for label, anyDown := range m.drivers.anyOf(now.Drivers, false) {
			set(driver, one(!anyDown), label)
		}
		for label, is := range m.drivers.anyOf(now.Missing, true) {
			if is {
				set(missing, 1, label)
			}
		}
		for labels, n := range m.drivers.sums(now.Volumes) {
			set(volumes, float64(n), labels.State, labels.Driver, labels.Handler)
		}
		for labels, n := range m.drivers.sums(now.Staged) {
			set(staged, float64(n), labels.Driver)
		}
		for desc, counts := range map[*prometheus.Desc][]VolumeCount{abnormal: now.Abnormal, groupless: now.GroupIgnored} {
			for labels, n := range m.drivers.sums(counts) {
				set(desc, float64(n), labels.Driver, labels.Handler)
			}
		}
		if cluster := now.Cluster; cluster != nil {
			set(heard, seconds(cluster.LastHeard))
			set(pods, float64(cluster.Pods))
			set(incomplete, float64(cluster.Incomplete))
		}
	}
	m.Registry.MustRegister(g)
}

// seconds is 0 for the zero time, which is long before 1970.
func seconds(t time.Time) float64 { return max(0, float64(t.UnixMilli())/1000) }

func one(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

// anyOf reports for each label whether one of its drivers is so: those beyond the bound share one.
func (d *drivers) anyOf(states map[string]bool, so bool) map[string]bool {
	found := make(map[string]bool)
	for name, is := range states {
		label := d.label(name)
		found[label] = found[label] || is == so
	}
	return found
}

// sums adds up the counts with the same labels: drivers beyond the bound share one.
func (d *drivers) sums(counts []VolumeCount) map[VolumeCount]int {
	sums := make(map[VolumeCount]int)
	for _, v := range counts {
		sums[VolumeCount{State: v.State, Driver: d.label(v.Driver), Handler: v.Handler}] += v.Count
	}
	return sums
}
