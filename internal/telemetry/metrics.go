package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// Metrics are all the metrics of the daemon, in a registry of their own.
type Metrics struct {
	Registry *prometheus.Registry

	calls      *prometheus.CounterVec
	durations  *prometheus.HistogramVec
	refused    *prometheus.CounterVec
	denied     prometheus.Counter
	repairs    *prometheus.CounterVec
	published  *prometheus.CounterVec
	sandbox    *prometheus.HistogramVec
	bypassed   *prometheus.CounterVec
	bypassing  *prometheus.GaugeVec
	renewed    *prometheus.CounterVec
	refusals   *prometheus.CounterVec
	forced     prometheus.Counter
	withErrors *prometheus.CounterVec
	drivers    drivers
	children   children
}

// buckets reach from an empty call to a sandbox that hangs.
var buckets = []float64{.00005, .0001, .0002, .0005, .001, .002, .005, .01, .05, .1, .5, 1, 5, 10, 60}

// NewMetrics registers everything. Version goes into crust_proxy_build_info.
func NewMetrics(version string) *Metrics {
	m := &Metrics{
		Registry: prometheus.NewRegistry(),
		calls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crust_proxy_calls_total", Help: "Calls answered, by gRPC code.",
		}, []string{"service", "method", "driver", "handler", "code"}),
		durations: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "crust_proxy_call_duration_seconds", Help: "Time taken by calls.", Buckets: buckets,
		}, []string{"service", "method", "driver", "handler"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crust_proxy_claims_refused_total", Help: "Devices that were not given to a volume, by reason.",
		}, []string{"reason"}),
		denied: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "crust_proxy_callers_denied_total", Help: "Calls refused because of the caller's uid and gids.",
		}),
		repairs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crust_proxy_reconcile_repairs_total", Help: "What reconciling put right, or could not.",
		}, []string{"action", "result"}),
		published: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "volumes_published_with_deferred_ops_total", Help: "Volumes published with deferred filesystem operations.",
		}, []string{"driver", "handler"}),
		sandbox: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "crust_proxy_sandbox_call_duration_seconds", Help: "Time sandboxes took to answer.", Buckets: buckets,
		}, []string{"handler", "call", "result"}),
	}
	m.bypassed = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "crust_proxy_driver_bypasses_total", Help: "Times a driver registered with kubelet directly, past the front.",
	}, []string{"driver"})
	m.bypassing = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "crust_proxy_driver_bypassed", Help: "1 while a driver is registered with kubelet directly, past the front.",
	}, []string{"driver"})
	m.renewed = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "crust_proxy_driver_registrations_renewed_total", Help: "Registrations with kubelet that were renewed because kubelet may have lost them.",
	}, []string{"driver"})
	m.refusals = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "crust_proxy_refusals_total", Help: "Times a volume that a pod waits for could not be deferred, by who said no.",
	}, []string{"driver", "party"})
	m.withErrors = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "crust_proxy_volumes_left_with_errors_total", Help: "Volumes given back whose filesystem had errors on record.",
	}, []string{"driver", "handler"})
	m.forced = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "crust_proxy_forced_releases_total", Help: "Volumes released by force, whoever had their device.",
	})
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "crust_proxy_build_info", Help: "1, labelled by version.", ConstLabels: prometheus.Labels{"version": version},
	})
	build.Set(1)
	m.Registry.MustRegister(m.calls, m.durations, m.refused, m.denied, m.repairs, m.published, m.sandbox, m.bypassed, m.bypassing, m.renewed, m.refusals, m.forced, m.withErrors, build,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// LeftWithErrors counts a volume that was given back with errors on record.
func (m *Metrics) LeftWithErrors(driver, handler string) {
	m.withErrors.WithLabelValues(m.drivers.label(driver), handler).Inc()
}

// ClaimRefused counts a device that was not given away.
func (m *Metrics) ClaimRefused(reason string) { m.refused.WithLabelValues(reason).Inc() }

// CallerDenied counts a caller who may not call.
func (m *Metrics) CallerDenied() { m.denied.Inc() }

// ReleasedByForce counts a volume that an operator released by force.
func (m *Metrics) ReleasedByForce() { m.forced.Inc() }

// Repaired counts what reconciling did.
func (m *Metrics) Repaired(action string, ok bool) {
	result := "ok"
	if !ok {
		result = "failed"
	}
	m.repairs.WithLabelValues(action, result).Inc()
}

// Published counts a volume.
func (m *Metrics) Published(driver, handler string) {
	m.published.WithLabelValues(m.drivers.label(driver), handler).Inc()
}

// SandboxAsked times an answer of a sandbox; result is "ok" or an error's kind.
func (m *Metrics) SandboxAsked(handler, call, result string, took time.Duration) {
	m.sandbox.WithLabelValues(handler, call, result).Observe(took.Seconds())
}

// VolumeRefused counts a volume that could not be deferred. The party is one of
// few, and of our own words.
func (m *Metrics) VolumeRefused(driver, party string) {
	m.refusals.WithLabelValues(m.drivers.label(driver), party).Inc()
}

// RegistrationRenewed counts a registration with kubelet that was renewed.
func (m *Metrics) RegistrationRenewed(driver string) {
	m.renewed.WithLabelValues(m.drivers.label(driver)).Inc()
}

// DriverBypassed tells that a driver registered with kubelet past the front, or
// that this is over.
func (m *Metrics) DriverBypassed(driver string, on bool) {
	label := m.drivers.label(driver)
	if !on {
		m.bypassing.DeleteLabelValues(label)
		return
	}
	m.bypassed.WithLabelValues(label).Inc()
	m.bypassing.WithLabelValues(label).Set(1)
}
