package telemetry

import (
	"testing"
	"time"
)

// values gives the value of each metric without labels, and the number of series of
// each with.
func values(t *testing.T, m *Metrics) map[string]float64 {
	t.Helper()
	families, err := m.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := make(map[string]float64)
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			if metric.GetGauge() != nil && len(metric.GetLabel()) == 0 {
				out[family.GetName()] = metric.GetGauge().GetValue()
			} else {
				out[family.GetName()]++
			}
		}
	}
	return out
}

func TestMetricsOfTheLookUp(t *testing.T) {
	m := NewMetrics("test")
	state := ClusterState{}
	asked := m.WatchCluster(func() ClusterState { return state })
	want := func(heard, pods, incomplete float64) {
		t.Helper()
		got := values(t, m)
		if got["crust_proxy_cluster_last_heard_timestamp_seconds"] != heard || got["crust_proxy_cluster_pods"] != pods ||
			got["crust_proxy_cluster_pods_incomplete"] != incomplete {
			t.Errorf("got %v", got)
		}
	}
	want(0, 0, 0)
	state = ClusterState{LastHeard: time.UnixMilli(1500), Pods: 3, Incomplete: 1}
	want(1.5, 3, 1)
	asked("pod", "ok", time.Millisecond)
	asked("volume", "timeout", 2*time.Second)
	if n := values(t, m)["crust_proxy_pod_lookup_duration_seconds"]; n != 2 {
		t.Errorf("%v series", n)
	}
}
