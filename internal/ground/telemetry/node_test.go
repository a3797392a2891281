package telemetry

import (
	"fmt"
	"testing"
	"time"
)

func TestNodeState(t *testing.T) {
	m := NewMetrics("test")
	now := NodeState{
		BadRecords: 2, Errors: 3, Warnings: 4, Sources: map[string]bool{"sandboxes": false},
		Handlers: map[string]bool{"kata": true, "crust": false}, Drivers: map[string]bool{"ebs": true, "": false},
		Missing:      map[string]bool{"ebs": true, "": false},
		Abnormal:     []VolumeCount{{Driver: "ebs", Handler: "kata", Count: 1}, {Driver: "ebs", Handler: "kata", Count: 2}},
		GroupIgnored: []VolumeCount{{Driver: "ebs", Handler: "kata", Count: 1}},
		Volumes:      []VolumeCount{{"published", "ebs", "kata", 2}, {"published", "ebs", "kata", 1}, {"removing", "", "kata", 1}},
		Staged:       []VolumeCount{{Driver: "ebs", Count: 1}, {Driver: "ebs", Count: 1}, {Count: 1}},
	}
	m.WatchNode(func() NodeState { return now })
	wantMetric(t, m, "crust_proxy_cluster_pods")
	wantMetric(t, m, "crust_proxy_config_last_reload_successful", " 1")
	wantMetric(t, m, "crust_proxy_config_bad_since_timestamp_seconds", " 0")
	wantMetric(t, m, "crust_proxy_records_unusable", " 2")
	wantMetric(t, m, "crust_proxy_findings", "severity=error 3", "severity=warning 4")
	wantMetric(t, m, "crust_proxy_source_synced", "source=sandboxes 0")
	wantMetric(t, m, "crust_proxy_handler_healthy", "handler=crust 0", "handler=kata 1")
	wantMetric(t, m, "crust_proxy_driver_ready", "driver=ebs 1", "driver=unknown 0")
	wantMetric(t, m, "crust_proxy_driver_missing_in_csinode", "driver=ebs 1")
	wantMetric(t, m, "crust_proxy_volumes_abnormal", "driver=ebs,handler=kata 3")
	wantMetric(t, m, "crust_proxy_volumes_group_ignored", "driver=ebs,handler=kata 1")
	wantMetric(t, m, "crust_proxy_devices_staged", "driver=ebs 2", "driver=unknown 1")

	wantMetric(t, m, "crust_proxy_volumes", "driver=ebs,handler=kata,state=published 3", "driver=unknown,handler=kata,state=removing 1")

	now.ConfigBadSince, now.Cluster = time.UnixMilli(2500), &ClusterState{}
	wantMetric(t, m, "crust_proxy_cluster_last_heard_timestamp_seconds", " 0")
	now.Cluster = &ClusterState{LastHeard: time.UnixMilli(1500), Pods: 3, Incomplete: 1}
	wantMetric(t, m, "crust_proxy_cluster_last_heard_timestamp_seconds", " 1.5")
	wantMetric(t, m, "crust_proxy_cluster_pods", " 3")
	wantMetric(t, m, "crust_proxy_cluster_pods_incomplete", " 1")
	wantMetric(t, m, "crust_proxy_config_last_reload_successful", " 0")
	wantMetric(t, m, "crust_proxy_config_bad_since_timestamp_seconds", " 2.5")
}

// TestDriversOverTheBoundShareOneBypass: it is over only where all of them have ended theirs.
func TestDriversOverTheBoundShareOneBypass(t *testing.T) {
	m := NewMetrics("test")
	for i := range maxDrivers {
		m.drivers.label(fmt.Sprint("known-", i))
	}
	m.DriverBypassed("known-1", true)
	m.DriverBypassed("more-1", true)
	m.DriverBypassed("more-2", true)
	m.DriverBypassed("known-1", false)
	m.DriverBypassed("more-1", false)
	wantMetric(t, m, "crust_proxy_driver_bypassed", "driver=other 1")
	m.DriverBypassed("more-2", false)
	wantMetric(t, m, "crust_proxy_driver_bypassed")
}

// TestDriversOverTheBoundShareOneState: ready only where all of them are. A registrar that has
// not answered has no name.
func TestDriversOverTheBoundShareOneState(t *testing.T) {
	m := NewMetrics("test")
	now := NodeState{Drivers: map[string]bool{"": true, noDriver: false}}
	m.WatchNode(func() NodeState { return now })
	wantMetric(t, m, "crust_proxy_driver_ready", "driver=unknown 0")
	for i := range maxDrivers {
		m.drivers.label(fmt.Sprint("known-", i))
	}
	now.Drivers = map[string]bool{"more-1": true, "more-2": true}
	wantMetric(t, m, "crust_proxy_driver_ready", "driver=other 1")
	now.Drivers["more-3"] = false
	wantMetric(t, m, "crust_proxy_driver_ready", "driver=other 0")
}
