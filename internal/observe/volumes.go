package observe

import "github.com/prometheus/client_golang/prometheus"

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
