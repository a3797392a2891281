package monitoring

import "strings"

// prometheusSource is the data source that the reader chooses.
var prometheusSource = datasource{Type: "prometheus", UID: "${datasource}"}

// shown is one panel, said shortly.
type shown struct {
	kind        string // stat, timeseries or table
	title, help string
	unit        string
	width       int
	// alarm colours a stat red from one on.
	alarm   bool
	queries []query
}

type query struct{ expr, legend string }

// row is a row of panels of one height.
type row struct {
	title  string
	height int
	panels []shown
}

const (
	grid        = 24
	statHeight  = 4
	graphHeight = 8
)

// sel is the selection by the variables, in every query; it stands for the
// labels' part of a selector.
const sel = `instance=~"$instance"`

func rows() []row {
	return []row{
		{"Now", statHeight, nowPanels()},
		{"Volumes", graphHeight, volumePanels()},
		{"Calls", graphHeight, callPanels()},
		{"Sandboxes", graphHeight, sandboxPanels()},
		{"CSI drivers behind the front", graphHeight, driverPanels()},
		{"What was refused or repaired", graphHeight, refusedPanels()},
		{"The daemon", graphHeight, processPanels()},
	}
}

func nowPanels() []shown {
	stat := func(title, help, expr string, alarm bool) shown {
		return shown{kind: "stat", title: title, help: help, width: 3, alarm: alarm, queries: []query{{expr, ""}}}
	}
	return []shown{
		stat("Nodes", "Daemons that were scraped.", `count(crust_proxy_build_info{SEL})`, false),
		stat("Volumes with a sandbox", "State bound.", `sum(crust_proxy_volumes{state="bound",SEL})`, false),
		stat("Without a sandbox", "State published: handed over, and no sandbox has them yet, or any more.",
			`sum(crust_proxy_volumes{state="published",SEL})`, false),
		stat("Degraded", "Something of the volume is missing; see the runbooks.", `sum(crust_proxy_volumes{state="degraded",SEL})`, true),
		stat("Refused", "Pods wait for them; see the FailedMount events.", `sum(crust_proxy_volumes{state="refused",SEL})`, true),
		stat("Filesystem went wrong", "By the word of their sandboxes.", `sum(crust_proxy_volumes_abnormal{SEL})`, true),
		stat("Drivers past the front", "CSI drivers that are registered with kubelet directly.", `sum(crust_proxy_driver_bypassed{SEL})`, true),
		stat("Nodes out of step", "Their sandboxes, or pods, cannot be followed.",
			`count(min by (instance) (crust_proxy_source_synced{SEL}) == 0)`, true),
	}
}

func volumePanels() []shown {
	return []shown{
		graph("Volumes by state", "", "short", 8, query{`sum by (state) (crust_proxy_volumes{SEL})`, "{{state}}"}),
		graph("Volumes by driver and handler", "", "short", 8,
			query{`sum by (driver, handler) (crust_proxy_volumes{SEL})`, "{{driver}} {{handler}}"}),
		graph("Published with deferral", "How often volumes were handed over; the counter of KEP-2857.", "ops", 8,
			query{`sum by (driver, handler) (rate(volumes_published_with_deferred_ops_total{SEL}[$__rate_interval]))`, "{{driver}} {{handler}}"}),
	}
}

func callPanels() []shown {
	return []shown{
		graph("Calls by service", "", "reqps", 6, query{`sum by (service) (rate(crust_proxy_calls_total{SEL}[$__rate_interval]))`, "{{service}}"}),
		graph("Calls that failed", "By what the caller was told. ABORTED and UNAVAILABLE are repeated by kubelet.", "reqps", 6,
			query{`sum by (method, code) (rate(crust_proxy_calls_total{code!="OK",SEL}[$__rate_interval])) > 0`, "{{method}} {{code}}"}),
		graph("Publishing and unpublishing, p99", "With what the driver takes.", "s", 6,
			query{p99(`method=~"NodeStageVolume|NodePublishVolume|NodeUnpublishVolume|NodeUnstageVolume|RuntimeStageVolume|RuntimeUnstageVolume",`), "{{method}}"}),
		graph("Usage, p99", "", "s", 6, query{p99(`method=~"NodeGetVolumeStats|RuntimeGetVolumeStats",`), "{{method}}"}),
	}
}

func p99(selector string) string {
	return `histogram_quantile(0.99, sum by (le, method) (rate(crust_proxy_call_duration_seconds_bucket{` + selector + `SEL}[$__rate_interval])))`
}

func sandboxPanels() []shown {
	quantile := func(q string) string {
		return `histogram_quantile(` + q + `, sum by (le, handler, call) (rate(crust_proxy_sandbox_call_duration_seconds_bucket{SEL}[$__rate_interval])))`
	}
	return []shown{
		graph("Time sandboxes take, p50", "", "s", 6, query{quantile("0.5"), "{{handler}} {{call}}"}),
		graph("Time sandboxes take, p99", "", "s", 6, query{quantile("0.99"), "{{handler}} {{call}}"}),
		graph("Answers of sandboxes", "", "reqps", 6,
			query{`sum by (handler, result) (rate(crust_proxy_sandbox_call_duration_seconds_count{SEL}[$__rate_interval]))`, "{{handler}} {{result}}"}),
		graph("Handlers that cannot work, sources that cannot be followed", "", "short", 6,
			query{`crust_proxy_handler_healthy{SEL} == 0`, "{{node}} {{instance}} {{handler}}"},
			query{`crust_proxy_source_synced{SEL} == 0`, "{{node}} {{instance}} {{source}}"}),
	}
}

func driverPanels() []shown {
	const service = `service="csi.v1.Node",`
	return []shown{
		graph("Nodes where the driver is ready", "", "short", 6, query{`sum by (driver) (crust_proxy_driver_ready{SEL})`, "{{driver}}"}),
		graph("Node calls by driver", "", "reqps", 6,
			query{`sum by (driver) (rate(crust_proxy_calls_total{` + service + `SEL}[$__rate_interval]))`, "{{driver}}"}),
		graph("Times a driver went past the front", "", "short", 6,
			query{`sum by (driver) (increase(crust_proxy_driver_bypasses_total{SEL}[$__rate_interval]))`, "{{driver}}"}),
		graph("Looking up pods, p99", "Nothing where no cluster is asked.", "s", 6, query{`histogram_quantile(0.99, sum by (le, question) ` +
			`(rate(crust_proxy_pod_lookup_duration_seconds_bucket{SEL}[$__rate_interval])))`, "{{question}}"}),
	}
}

func refusedPanels() []shown {
	return []shown{
		graph("Volumes that could not be deferred", "By who said no. kubelet tries again and again: each try counts.", "short", 6,
			query{`sum by (driver, party) (increase(crust_proxy_refusals_total{SEL}[$__rate_interval]))`, "{{driver}} {{party}}"}),
		graph("Devices that were not given to a volume", "in-use: two pods want one disk.", "short", 6,
			query{`sum by (reason) (increase(crust_proxy_claims_refused_total{SEL}[$__rate_interval]))`, "{{reason}}"}),
		graph("Reconciling", "What was put right, or could not be.", "short", 6,
			query{`sum by (action, result) (increase(crust_proxy_reconcile_repairs_total{SEL}[$__rate_interval]))`, "{{action}} {{result}}"}),
		graph("Callers that may not call", "", "short", 6,
			query{`sum by (node, instance) (increase(crust_proxy_callers_denied_total{SEL}[$__rate_interval]))`, "{{node}} {{instance}}"}),
	}
}

func processPanels() []shown {
	const job = `job=~".*crust-proxy.*",`
	versions := shown{kind: "table", title: "Versions", width: 6, queries: []query{{`count by (version) (crust_proxy_build_info{SEL})`, ""}}}
	return []shown{
		graph("Resident memory", "", "bytes", 6, query{`process_resident_memory_bytes{` + job + `SEL}`, "{{node}} {{instance}}"}),
		graph("Processors", "", "short", 6, query{`rate(process_cpu_seconds_total{` + job + `SEL}[$__rate_interval])`, "{{node}} {{instance}}"}),
		graph("Open descriptors, goroutines", "One descriptor a claimed device.", "short", 6,
			query{`process_open_fds{` + job + `SEL}`, "{{node}} {{instance}} descriptors"},
			query{`go_goroutines{` + job + `SEL}`, "{{node}} {{instance}} goroutines"}),
		versions,
	}
}

func graph(title, help, unit string, width int, queries ...query) shown {
	return shown{kind: "timeseries", title: title, help: help, unit: unit, width: width, queries: queries}
}

// selected puts the variables' selection into a query.
func selected(expr string) string { return strings.ReplaceAll(expr, "SEL", sel) }
