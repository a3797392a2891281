package prometheus

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/promslog"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
)

// story is what a node's metrics are, in Prometheus' notation: one value a minute.
type story struct {
	// quiet never fires; loud does after so many minutes, and not before.
	quiet, loud string
	after       int
	// says is in the summary.
	says string
}

const at = `job="crust-proxy",instance="10.0.0.1:9814",node="n1"`

// stories are by the alert's name, and what follows it where it has several.
var stories = map[string]story{
	"CrustProxyDown": {
		quiet: `up{AT} 1 0 0 0 1x60
			up{job="other",instance="x"} 0x60`,
		loud: `up{AT} 0x60`, after: 5, says: "n1 does not answer",
	},
	"CrustProxyDown without a target": { // quiet: a pod and a node that were replaced, a target without a node
		quiet: `up{AT} 1x10 stale _x48
			up{job="crust-proxy",instance="10.0.0.2:9814",node="n1"} _x12 1x47
			up{job="crust-proxy",instance="10.0.0.3:9814",node="n3"} 1x10 stale _x48
			up{job="crust-proxy",instance="10.0.0.4:9814"} 1x10 stale _x48
			kube_node_info{node="n3"} 1x12 stale _x46
			kube_node_info{node="n4"} 1x60`,
		loud: `up{AT} 1x10 stale _x48
			kube_node_info{node="n1"} 1x10 stale _x48`, after: 16, says: "n1 does not answer",
	},
	"CrustProxyRestarts": {
		quiet: `process_start_time_seconds{AT} 100x30 200x30`,
		loud:  `process_start_time_seconds{AT} 100 160 220 280 340 400x60`, after: 4, says: "4 times",
	},
	"CrustProxyRestarts with back-off": { // kubelet starts a container that ended every five minutes
		quiet: `process_start_time_seconds{AT} 100x10 200x10 300x10 400x10 500x10 600x10`,
		loud:  `process_start_time_seconds{AT} 100 stale _x5 200 stale _x5 300 stale _x5 400 stale _x5 500 stale _x5 600 stale _x5 700x20`, after: 42, says: "6 times",
	},
	"CrustProxyConfigurationBad": {
		quiet: `crust_proxy_config_last_reload_successful{AT} 1 1 0 0 1x60`,
		loud:  `crust_proxy_config_last_reload_successful{AT} 0x60`, after: 5, says: "is invalid",
	},
	"CrustProxyRecordsUnusable": {
		quiet: `crust_proxy_records_unusable{AT} 0x60`,
		loud:  `crust_proxy_records_unusable{AT} 2x60`, after: 5, says: "2 volume records",
	},
	"CrustProxyRepairsFail": {
		quiet: `crust_proxy_reconcile_repairs_total{AT,action="guard",result="ok"} 0+1x60
			crust_proxy_reconcile_repairs_total{AT,action="guard",result="failed"} 0 0 1x60`,
		loud: `crust_proxy_reconcile_repairs_total{AT,action="guard",result="failed"} 0+1x60`, after: 16, says: "(guard)",
	},
	"CrustProxyVolumesDegraded": {
		quiet: `crust_proxy_volumes{AT,state="bound",driver="ebs",handler="kata"} 5x60
			crust_proxy_volumes{AT,state="degraded",driver="ebs",handler="kata"} 1 1 1 stale _x56`,
		loud: `crust_proxy_volumes{AT,state="degraded",driver="ebs",handler="kata"} 3x60`, after: 5, says: "3 deferred volumes of ebs",
	},
	"CrustProxyRemovalStuck": {
		quiet: `crust_proxy_volumes{AT,state="removing",driver="ebs",handler="kata"} 1x10 stale 1x10 stale 1x10 stale _x20`,
		loud:  `crust_proxy_volumes{AT,state="removing",driver="ebs",handler="kata"} 1x60`, after: 15, says: "1 volumes of ebs",
	},
	"CrustProxyDevicesHeld": {
		quiet: `crust_proxy_devices_held{AT} 1x9 0 1x9 0x40`,
		loud:  `crust_proxy_devices_held{AT} 2x60`, after: 10, says: "2 devices on n1 are held",
	},
	"CrustProxyOrphanStays": {
		quiet: `crust_proxy_orphans_total{AT,result="ok"} 0+1x60
			crust_proxy_orphans_total{AT,result="failed"} 3x9 4x50`, // a huge VM that takes long to end
		loud: `crust_proxy_orphans_total{AT,result="failed"} 0+1x60`, after: 7, says: "still runs on n1",
	},
	"CrustProxyVolumesAbnormal": {
		quiet: `crust_proxy_volumes_abnormal{AT,driver="ebs",handler="kata"} 1 1 stale _x57`,
		loud:  `crust_proxy_volumes_abnormal{AT,driver="ebs",handler="kata"} 1x60`, after: 5, says: "1 volumes of ebs",
	},
	"CrustProxyVolumesLeftWithErrors": {
		quiet: `crust_proxy_volumes_left_with_errors_total{AT,driver="ebs",handler="kata"} 1x60`,
		loud:  `crust_proxy_volumes_left_with_errors_total{AT,driver="ebs",handler="kata"} 0x9 1x50`, after: 10, says: "A volume of ebs on n1",
	},
	"CrustProxyVolumesRefused": {
		quiet: `crust_proxy_refusals_total{AT,driver="ebs",party="pods"} 0 0 1 2x58`,
		loud: `crust_proxy_refusals_total{AT,driver="ebs",party="policy"} 0+1x60
			crust_proxy_refusals_total{AT,driver="ebs",party="pods"} 3x60`,
		after: 16, says: "Volumes of ebs on n1 are refused (policy)",
	},
	"CrustProxyCallsFail": {
		quiet: `crust_proxy_calls_total{AT,method="NodePublishVolume",handler="kata",code="OK"} 0+30x60
			crust_proxy_calls_total{AT,method="NodePublishVolume",handler="kata",code="Internal"} 0+1x60
			crust_proxy_calls_total{AT,method="NodePublishVolume",handler="kata",code="Aborted"} 0+30x60
			crust_proxy_calls_total{AT,method="NodePublishVolume",handler="kata",code="FailedPrecondition"} 0+30x60
			crust_proxy_calls_total{AT,method="NodePublishVolume",handler="",code="Internal"} 0+90x60
			crust_proxy_calls_total{AT,method="NodeGetVolumeStats",handler="kata",code="Internal"} 0+90x60
			crust_proxy_calls_total{AT,method="NodeStageVolume",handler="kata",code="Internal"} 0x9 0+9x4 36x45`, // a short burst
		loud: `crust_proxy_calls_total{AT,method="NodePublishVolume",handler="kata",code="OK"} 0+9x60
			crust_proxy_calls_total{AT,method="NodePublishVolume",handler="kata",code="Unavailable"} 0+1x60`,
		after: 16, says: "10% of NodePublishVolume",
	},
	"CrustProxyCallsFail at the end": { // the front has released the volume; kubelet repeats the call every two minutes or later
		quiet: `crust_proxy_calls_total{AT,driver="ebs",method="NodeUnpublishVolume",handler="",code="Aborted"} 0+1x60`,
		loud: `crust_proxy_calls_total{AT,driver="ebs",method="NodeUnpublishVolume",handler="kata",code="OK"} 0+1x60
			crust_proxy_calls_total{AT,driver="ebs",method="NodeUnpublishVolume",handler="",code="Internal"} 0 1 1 1 1 2 2 2 2 3 3 3 3 4 4 4 4 5 5 5 5 6x40`,
		after: 16, says: "of NodeUnpublishVolume of ebs",
	},
	"CrustProxyCallsSlow": {
		quiet: `crust_proxy_call_duration_seconds_bucket{AT,method="NodeStageVolume",handler="kata",le="5"} 0+100x60
			crust_proxy_call_duration_seconds_bucket{AT,method="NodeStageVolume",handler="kata",le="60"} 0+100x60
			crust_proxy_call_duration_seconds_bucket{AT,method="NodeStageVolume",handler="kata",le="+Inf"} 0+100x60
			crust_proxy_call_duration_seconds_bucket{AT,method="NodePublishVolume",handler="kata",le="10"} 0x60
			crust_proxy_call_duration_seconds_bucket{AT,method="NodePublishVolume",handler="kata",le="60"} 0x9 0+9x4 36x45
			crust_proxy_call_duration_seconds_bucket{AT,method="NodePublishVolume",handler="kata",le="+Inf"} 0x9 0+9x4 36x45
			crust_proxy_call_duration_seconds_bucket{AT,method="NodeStageVolume",handler="",le="60"} 0x60
			crust_proxy_call_duration_seconds_bucket{AT,method="NodeStageVolume",handler="",le="+Inf"} 0+9x60`,
		loud: `crust_proxy_call_duration_seconds_bucket{AT,method="NodeStageVolume",handler="kata",le="10"} 0+8x60
			crust_proxy_call_duration_seconds_bucket{AT,method="NodeStageVolume",handler="kata",le="60"} 0+10x60
			crust_proxy_call_duration_seconds_bucket{AT,method="NodeStageVolume",handler="kata",le="+Inf"} 0+10x60`,
		after: 16, says: "NodeStageVolume",
	},
	"CrustProxyHandlerUnhealthy": {
		quiet: `crust_proxy_handler_healthy{AT,handler="kata"} 1x60`,
		loud: `crust_proxy_handler_healthy{AT,handler="kata"} 0x60
			crust_proxy_handler_healthy{AT,handler="crust"} 1x60`, after: 5, says: "handler kata on n1",
	},
	"CrustProxyDriverBypassed": {
		quiet: `crust_proxy_driver_bypassed{AT,driver="ebs"} 1 stale _x58`,
		loud:  `crust_proxy_driver_bypassed{AT,driver="ebs"} 1x60`, after: 2, says: "driver ebs on n1",
	},
	"CrustProxyDriverNotReady": {
		quiet: `crust_proxy_driver_ready{AT,driver="ebs"} 0x5 1x55`,
		loud:  `crust_proxy_driver_ready{AT,driver="ebs"} 0x60`, after: 10, says: "driver ebs behind",
	},
	"CrustProxyDriverNotInCSINode": {
		quiet: `crust_proxy_driver_missing_in_csinode{AT,driver="ebs"} 1x5 stale _x54`,
		loud:  `crust_proxy_driver_missing_in_csinode{AT,driver="ebs"} 1x60`, after: 10, says: "driver ebs on n1",
	},
	"CrustProxySandboxesUnknown": {
		quiet: `crust_proxy_source_synced{AT,source="sandboxes"} 0x5 1x55`,
		loud:  `crust_proxy_source_synced{AT,source="sandboxes"} 0x60`, after: 10, says: "sandboxes",
	},
	"CrustProxyPodsUnknown": {
		quiet: `crust_proxy_source_synced{AT,source="pods"} 0x5 1x55
			crust_proxy_source_synced{AT,source="sandboxes"} 0x60
			crust_proxy_cluster_pods_incomplete{AT} 3x60`,
		loud: `crust_proxy_source_synced{AT,source="pods"} 1x60
			crust_proxy_source_synced{AT,source="csidrivers"} 0x60`,
		after: 10, says: "pods of its node",
	},
	"CrustProxySandboxesFail": {
		quiet: `crust_proxy_sandbox_call_duration_seconds_count{AT,handler="kata",call="stats",result="ok"} 0+9x60
			crust_proxy_sandbox_call_duration_seconds_count{AT,handler="kata",call="stats",result="timeout"} 0+1x60
			crust_proxy_sandbox_call_duration_seconds_count{AT,handler="kata",call="stats",result="no-sandbox"} 0+9x60`,
		loud: `crust_proxy_sandbox_call_duration_seconds_count{AT,handler="kata",call="stats",result="ok"} 0+6x60
			crust_proxy_sandbox_call_duration_seconds_count{AT,handler="kata",call="stats",result="timeout"} 0+4x60`,
		after: 16, says: "40%",
	},
	"CrustProxyCallersDenied": {
		quiet: `crust_proxy_callers_denied_total{AT} 0 0 1 2 3 4x60`,
		loud:  `crust_proxy_callers_denied_total{AT} 0+1x60`, after: 16, says: "without permission",
	},
}

func TestAlertsFire(t *testing.T) {
	seen := 0
	for _, rule := range alertRules(t) {
		before := seen
		for name, told := range stories {
			if alert, _, _ := strings.Cut(name, " "); alert == rule.Alert {
				seen++
				t.Run(name, func(t *testing.T) { told.wantToldBy(t, rule) })
			}
		}
		if seen == before {
			t.Errorf("no story is told of %s", rule.Alert)
		}
	}
	if seen != len(stories) {
		t.Errorf("%d stories are told, and %d of them of alerts that are there", len(stories), seen)
	}
}

func (s story) wantToldBy(t *testing.T, rule rulefmt.Rule) {
	t.Helper()
	if at, text := firstFiring(t, rule, s.quiet); at >= 0 {
		t.Errorf("fires after %d minutes of quiet: %s", at, text)
	}
	at, text := firstFiring(t, rule, s.loud)
	if at != s.after {
		t.Errorf("fires after %d minutes, should after %d", at, s.after)
	}
	if !strings.Contains(text, s.says) || !strings.Contains(text, "n1") || strings.Contains(text, "<") {
		t.Errorf("says %q", text)
	}
}

// firstFiring evaluates a rule each minute for an hour. It gives the minute in which
// an alert fires, or -1, and its summary.
func firstFiring(t *testing.T, rule rulefmt.Rule, series string) (minute int, summary string) {
	t.Helper()
	storage := promqltest.LoadedStorage(t, "load 1m\n"+strings.ReplaceAll(series, "AT", at))
	defer func() { _ = storage.Close() }()
	parsed, err := promQL.ParseExpr(rule.Expr)
	if err != nil {
		t.Fatal(err)
	}
	alert := rules.NewAlertingRule(rule.Alert, parsed, time.Duration(rule.For), 0, labels.FromMap(rule.Labels),
		labels.FromMap(rule.Annotations), labels.EmptyLabels(), "", true, promslog.NewNopLogger())
	query := rules.EngineQueryFunc(promqltest.NewTestEngine(t, false, 0, promqltest.DefaultMaxSamplesPerQuery), storage)
	for minute := range 60 {
		now := time.Unix(0, 0).Add(time.Duration(minute) * time.Minute)
		if _, err := alert.Eval(t.Context(), 0, now, query, nil, 0); err != nil {
			t.Fatal(err)
		}
		for _, active := range alert.ActiveAlerts() {
			if active.State == rules.StateFiring {
				return minute, active.Annotations.Get("summary")
			}
		}
	}
	return -1, ""
}
