package monitoring

import (
	"slices"
	"strings"
)

// Alert is one alert rule.
type Alert struct {
	Name string
	// Expr is PromQL; what it gives is what is alerted.
	Expr string
	// For is how long that has to be so.
	For      string
	Severity string
	// Summary is one line for a pager, and Description says what follows for
	// pods. Both are Prometheus' templates.
	Summary, Description string
}

// Severities: critical wants somebody now, warning wants somebody today.
const (
	critical = "critical"
	warning  = "warning"
)

const runbooks = "https://github.com/crust-proxy/crust-proxy/blob/main/docs/runbooks.md"

// Runbook is the place in docs/runbooks.md that says what to do.
func (a Alert) Runbook() string { return runbooks + "#" + strings.ToLower(a.Name) }

// on names the node in a summary. A scrape that says the node's name as "node"
// is shown by it.
const on = `{{ with $labels.node }}{{ . }}{{ else }}{{ $labels.instance }}{{ end }}`

// Alerts are few: each is something that somebody has to do something about.
func Alerts() []Alert {
	return slices.Concat(aliveAlerts(), volumeAlerts(), partyAlerts())
}

// aliveAlerts are of the daemon itself.
func aliveAlerts() []Alert {
	return []Alert{{
		Name: "CrustProxyDown", Expr: `up{job=~".*crust-proxy.*"} == 0`, For: "5m", Severity: critical,
		Summary: "crust-proxy on " + on + " does not answer.",
		Description: "No deferred volume comes or goes on this node, and kubelet's calls to drivers behind the front wait. " +
			"Running pods keep their volumes.",
	}, {
		Name: "CrustProxyRestarts", Expr: `changes(process_start_time_seconds{job=~".*crust-proxy.*"}[15m]) > 3`, Severity: critical,
		Summary:     "crust-proxy on " + on + " started {{ $value | humanize }} times in a quarter of an hour.",
		Description: "It ends soon after each start. Volumes and pods are not touched by that, but calls may fail in between.",
	}, {
		Name: "CrustProxyConfigurationBad", Expr: `crust_proxy_config_last_reload_successful == 0`, For: "5m", Severity: warning,
		Summary:     "The configuration of crust-proxy on " + on + " was changed into a bad one.",
		Description: "What was in force before stays in force until the daemon is restarted; a restart would fail.",
	}, {
		Name: "CrustProxyRecordsUnusable", Expr: `crust_proxy_records_unusable > 0`, For: "5m", Severity: warning,
		Summary: "{{ $value }} records of volumes on " + on + " cannot be used.",
		Description: "Their volumes are left alone: nobody unpublishes them until the records are put right. Of a newer form " +
			"they are after a downgrade.",
	}, {
		Name:     "CrustProxyRepairsFail",
		Expr:     `sum by (instance, node, action) (increase(crust_proxy_reconcile_repairs_total{result="failed"}[10m])) > 0`,
		For:      "15m",
		Severity: warning,
		Summary:  `crust-proxy on ` + on + ` cannot put right what differs ({{ $labels.action }}).`,
		Description: "Each reconcile finds something that is not as the records say, and fails to repair it. " +
			"The log has a line \"repair failed\" with the volume.",
	}}
}

// volumeAlerts are of volumes.
func volumeAlerts() []Alert {
	return []Alert{{
		Name: "CrustProxyVolumesDegraded", Expr: `sum by (instance, node, driver, handler) (crust_proxy_volumes{state="degraded"}) > 0`,
		For: "5m", Severity: critical,
		Summary: "{{ $value }} deferred volumes of {{ $labels.driver }} on " + on + " are degraded.",
		Description: "Something of each is missing that could not be put back: its device, its guard, or its handler. " +
			"A container that starts on it may fail, or find no volume.",
	}, {
		Name: "CrustProxyRemovalStuck", Expr: `sum by (instance, node, driver, handler) (crust_proxy_volumes{state="removing"}) > 0`,
		For: "15m", Severity: warning,
		Summary:     "The removal of {{ $value }} volumes of {{ $labels.driver }} on " + on + " does not end.",
		Description: "Their pods stay in Terminating, and their devices stay attached, until it does.",
	}, {
		Name: "CrustProxyVolumesAbnormal", Expr: `sum by (instance, node, driver, handler) (crust_proxy_volumes_abnormal) > 0`,
		For: "5m", Severity: critical,
		Summary: "{{ $value }} volumes of {{ $labels.driver }} on " + on + " have a filesystem that went wrong.",
		Description: "The sandbox says that the filesystem went read-only, was shut down, or has errors on record. " +
			"Workloads may fail to write.",
	}, {
		Name: "CrustProxyVolumesRefused", Expr: `sum by (instance, node, driver, party) (increase(crust_proxy_refusals_total[10m])) > 0`,
		For: "15m", Severity: warning,
		Summary: "Volumes of {{ $labels.driver }} on " + on + " are refused ({{ $labels.party }}).",
		Description: "Pods wait for volumes that are to be deferred and cannot be. Each has the reason in a FailedMount event; " +
			"\"crustctl list --state refused\" has all of the node's.",
	}}
}

// partyAlerts are of the parties that the daemon works with.
func partyAlerts() []Alert {
	return []Alert{{
		Name: "CrustProxyHandlerUnhealthy", Expr: `crust_proxy_handler_healthy == 0`, For: "5m", Severity: critical,
		Summary:     "The runtime handler {{ $labels.handler }} on " + on + " cannot work.",
		Description: "Volumes cannot be handed to its sandboxes: new pods with deferred volumes do not start.",
	}, {
		Name: "CrustProxyDriverBypassed", Expr: `crust_proxy_driver_bypassed == 1`, For: "2m", Severity: critical,
		Summary: "The CSI driver {{ $labels.driver }} on " + on + " is registered with kubelet directly.",
		Description: "kubelet may call it past crust-proxy and mount on the host what should be deferred. " +
			"An upgrade of the driver has probably undone the changed registration path.",
	}, {
		Name: "CrustProxyDriverNotReady", Expr: `crust_proxy_driver_ready == 0`, For: "10m", Severity: warning,
		Summary:     "The CSI driver {{ $labels.driver }} behind crust-proxy on " + on + " is not ready.",
		Description: "kubelet's calls to it fail with UNAVAILABLE: pods with its volumes neither start nor end.",
	}, {
		Name: "CrustProxySandboxesUnknown", Expr: `crust_proxy_source_synced{source="sandboxes"} == 0`, For: "10m", Severity: warning,
		Summary: "crust-proxy on " + on + " cannot follow the container runtime's sandboxes.",
		Description: "The ends of sandboxes are learned late, and sandboxes of Kata's runtime-rs are not found: " +
			"no usage of their volumes is known.",
	}, {
		Name: "CrustProxyPodsUnknown", Expr: `sum by (instance, node) (crust_proxy_source_synced{source=~"pods|runtimeclasses|csidrivers"} == 0)` +
			` or sum by (instance, node) (crust_proxy_cluster_pods_incomplete) > 0`,
		For: "10m", Severity: warning,
		Summary: "crust-proxy on " + on + " cannot follow the pods of its node.",
		Description: "What it knows of pods is old or has gaps. New pods whose volumes need it do not start; those that run are " +
			"not touched.",
	}, {
		Name: "CrustProxySandboxesFail",
		Expr: `sum by (instance, node, handler) (rate(crust_proxy_sandbox_call_duration_seconds_count{result!~"ok|no-sandbox|canceled|unsupported"}[10m]))` +
			` / sum by (instance, node, handler) (rate(crust_proxy_sandbox_call_duration_seconds_count[10m])) > 0.2`,
		For: "15m", Severity: warning,
		Summary:     "{{ $value | humanizePercentage }} of the calls to sandboxes of {{ $labels.handler }} on " + on + " fail.",
		Description: "Usage of their volumes is old or unknown, and they do not grow. The volumes themselves are not touched.",
	}, {
		Name: "CrustProxyCallersDenied", Expr: `increase(crust_proxy_callers_denied_total[15m]) > 0`, For: "15m", Severity: warning,
		Summary:     "Somebody on " + on + " calls crust-proxy and may not.",
		Description: "A process whose uid and gids are not among those in \"authorization\" keeps on calling.",
	}}
}
