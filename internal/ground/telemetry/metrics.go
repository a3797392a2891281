package telemetry

import (
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc/codes"
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
	orphans    *prometheus.CounterVec
	withErrors *prometheus.CounterVec
	lookups    *prometheus.HistogramVec
	drivers    drivers
}

// buckets range from an empty call to a sandbox that hangs.
var buckets = []float64{.00005, .0001, .0002, .0005, .001, .002, .005, .01, .05, .1, .5, 1, 5, 10, 60}

// NewMetrics registers everything. Version goes into crust_proxy_build_info.
func NewMetrics(version string) *Metrics {
	registry := prometheus.NewRegistry()
	auto := promauto.With(registry)
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return auto.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	// The end of their names tells histograms from the rest: the checks of alerts and dashboard rely on it.
	histogram := func(of, help string, labels ...string) *prometheus.HistogramVec {
		return auto.NewHistogramVec(prometheus.HistogramOpts{Name: of + "_duration_seconds", Help: help, Buckets: buckets}, labels)
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return auto.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	}
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	gauge("crust_proxy_build_info", "1, labelled by version.", "version").WithLabelValues(version).Set(1)
	return &Metrics{
		Registry:   registry,
		drivers:    drivers{seen: make(map[string]bool), bypasses: make(map[string]int)},
		calls:      counter("crust_proxy_calls_total", "Calls answered, by gRPC code.", "service", "method", "driver", "handler", "code"),
		durations:  histogram("crust_proxy_call", "Time taken by calls.", "service", "method", "driver", "handler"),
		refused:    counter("crust_proxy_claims_refused_total", "Devices that were not given to a volume, by reason.", "reason"),
		denied:     counter("crust_proxy_callers_denied_total", "Calls refused because of the caller's uid and gids.").WithLabelValues(),
		repairs:    counter("crust_proxy_reconcile_repairs_total", "What reconciling put right, or could not.", "action", "result"),
		published:  counter("volumes_published_with_deferred_ops_total", "Volumes published with deferred filesystem operations.", "driver", "handler"),
		lookups:    histogram("crust_proxy_pod_lookup", "Time taken to look up a pod, or the pods that use a volume.", "question", "result"),
		sandbox:    histogram("crust_proxy_sandbox_call", "Time sandboxes took to answer.", "handler", "call", "result"),
		bypassed:   counter("crust_proxy_driver_bypasses_total", "Times a driver registered with kubelet directly, past the front.", "driver"),
		bypassing:  gauge("crust_proxy_driver_bypassed", "1 while a driver is registered with kubelet directly, past the front.", "driver"),
		renewed:    counter("crust_proxy_driver_registrations_renewed_total", "Registrations with kubelet that were renewed because kubelet may have lost them.", "driver"),
		refusals:   counter("crust_proxy_refusals_total", "Times a volume that a pod waits for could not be deferred, by who said no.", "driver", "party"),
		withErrors: counter("crust_proxy_volumes_left_with_errors_total", "Volumes given back whose filesystem had errors on record.", "driver", "handler"),
		orphans:    counter("crust_proxy_orphans_total", "Processes of forgotten sandboxes that kept a volume, by whether they could be ended.", "result"),
		forced:     counter("crust_proxy_forced_releases_total", "Volumes released by force, whoever had their device.").WithLabelValues(),
	}
}

// called counts a call, and its time where that says something about the daemon.
func (m *Metrics) called(method string, call *Call, code codes.Code, timed bool, took time.Duration) {
	service, short, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	driver := m.drivers.label(call.Driver)
	if timed {
		m.durations.WithLabelValues(service, short, driver, call.Handler).Observe(took.Seconds())
	}
	if code > codes.Unauthenticated { // the last one; a driver may answer any number
		code = codes.Unknown
	}
	m.calls.WithLabelValues(service, short, driver, call.Handler, code.String()).Inc()
}

// LeftWithErrors counts a volume that was given back while its filesystem records errors.
func (m *Metrics) LeftWithErrors(driver, handler string) {
	m.withErrors.WithLabelValues(m.drivers.label(driver), handler).Inc()
}

// ClaimRefused counts a device that was refused to a volume.
func (m *Metrics) ClaimRefused(reason string) { m.refused.WithLabelValues(reason).Inc() }

// CallerDenied counts a call of a peer that may not call.
func (m *Metrics) CallerDenied() { m.denied.Inc() }

// ReleasedByForce counts a volume that an operator released by force.
func (m *Metrics) ReleasedByForce() { m.forced.Inc() }

// OrphanEnded counts an orphan that was ended, or that could not be.
func (m *Metrics) OrphanEnded(ok bool) { m.orphans.WithLabelValues(okOrFailed(ok)).Inc() }

// Repaired counts a repair of reconcile.
func (m *Metrics) Repaired(action string, ok bool) {
	m.repairs.WithLabelValues(action, okOrFailed(ok)).Inc()
}

// Published counts a volume that was deferred.
func (m *Metrics) Published(driver, handler string) {
	m.Deferred(driver, handler)
	m.published.WithLabelValues(m.drivers.label(driver), handler).Inc()
}

// Deferred starts the counters of a volume that is deferred at 0: Prometheus sees no increase in a first value.
func (m *Metrics) Deferred(driver, handler string) {
	m.withErrors.WithLabelValues(m.drivers.label(driver), handler)
	m.orphans.WithLabelValues(okOrFailed(true))
	m.orphans.WithLabelValues(okOrFailed(false))
}

// SandboxAsked records how long a sandbox took to answer; result is "ok" or an error's kind.
func (m *Metrics) SandboxAsked(handler, call, result string, took time.Duration) {
	m.sandbox.WithLabelValues(handler, call, result).Observe(took.Seconds())
}

// PodLookedUp records how long a lookup of pods took; result is "ok" or an error's kind.
func (m *Metrics) PodLookedUp(question, result string, took time.Duration) {
	m.lookups.WithLabelValues(question, result).Observe(took.Seconds())
}

// VolumeRefused counts a volume that could not be deferred. The party is one of a few fixed words.
func (m *Metrics) VolumeRefused(driver, party string) {
	m.refusals.WithLabelValues(m.drivers.label(driver), party).Inc()
}

// RegistrationRenewed counts a registration with kubelet that was renewed.
func (m *Metrics) RegistrationRenewed(driver string) {
	m.renewed.WithLabelValues(m.drivers.label(driver)).Inc()
}

// DriverBypassed records that a driver registered with kubelet directly, or that this has ended.
func (m *Metrics) DriverBypassed(driver string, on bool) {
	label := m.drivers.label(driver)
	if on {
		m.drivers.addBypass(label, 1)
		m.bypassed.WithLabelValues(label).Inc()
		m.bypassing.WithLabelValues(label).Set(1)
	} else if m.drivers.addBypass(label, -1) == 0 {
		m.bypassing.DeleteLabelValues(label)
	}
}

func okOrFailed(ok bool) string {
	if ok {
		return "ok"
	}
	return "failed"
}

// maxDrivers bounds how many driver names become label values, because the names come from
// outside. All further ones are counted as otherDriver.
const maxDrivers = 64

// maxDriverName is the longest name that CSI allows.
const maxDriverName = 63

const (
	noDriver    = "unknown"
	otherDriver = "other"
)

type drivers struct {
	mu       sync.Mutex
	seen     map[string]bool
	bypasses map[string]int // how many drivers of a label are registered directly
}

func (d *drivers) addBypass(label string, n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.bypasses[label] += n
	return d.bypasses[label]
}

func (d *drivers) label(name string) string {
	if name == "" {
		return noDriver
	}
	if len(name) > maxDriverName || !utf8.ValidString(name) {
		return otherDriver
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.seen[name] && len(d.seen) >= maxDrivers {
		return otherDriver
	}
	d.seen[name] = true
	return name
}
