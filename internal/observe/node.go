package observe

import "github.com/prometheus/client_golang/prometheus"

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
	// Abnormal counts the volumes whose sandbox last said that their filesystem
	// is not as it should be; State is not used.
	Abnormal []VolumeCount
}

// WatchNode makes the metrics of the node's state ask state at each scrape.
func (m *Metrics) WatchNode(state func() NodeState) error {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	return m.Registry.Register(&nodeCollector{
		state: state, drivers: &m.drivers,
		config:   desc("crust_proxy_config_last_reload_successful", "1 unless the configuration file was changed into a bad one."),
		records:  desc("crust_proxy_records_unusable", "Records of volumes that cannot be used."),
		source:   desc("crust_proxy_source_synced", "1 while a source outside of the daemon can be followed.", "source"),
		handler:  desc("crust_proxy_handler_healthy", "1 while a runtime handler can work.", "handler"),
		driver:   desc("crust_proxy_driver_ready", "1 while a CSI driver behind the front is ready.", "driver"),
		abnormal: desc("crust_proxy_volumes_abnormal", "Volumes whose sandbox says that their filesystem is not as it should be.", "driver", "handler"),
	})
}

type nodeCollector struct {
	state   func() NodeState
	drivers *drivers

	config, records, source, handler, driver, abnormal *prometheus.Desc
}

// Describe is for the registry.
func (c *nodeCollector) Describe(out chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{c.config, c.records, c.source, c.handler, c.driver, c.abnormal} {
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
	abnormal := make(map[[2]string]int)
	for _, v := range now.Abnormal {
		abnormal[[2]string{c.drivers.label(v.Driver), v.Handler}] += v.Count
	}
	for labels, n := range abnormal {
		gauge(c.abnormal, float64(n), labels[0], labels[1])
	}
}

func one(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}
