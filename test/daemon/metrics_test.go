//go:build system

package daemon

import (
	"regexp"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/monitoring"
	"github.com/crust-proxy/crust-proxy/test/harness"
)

// TestMetricsAreThoseThatMonitoringKnows: alerts and dashboard are checked against
// the catalog, so the real daemon must show nothing else, and what stands for the
// node's state.
func TestMetricsAreThoseThatMonitoringKnows(t *testing.T) {
	d := harness.NewDaemon(t)
	d.Start()
	req := d.StageRequest("pod-1", harness.Disk(t, 16*mib, ""))
	_, err := d.Runtime().RuntimeStageVolume(t.Context(), req)
	must(t, err)
	body, err := d.HTTP("/metrics")
	must(t, err)
	catalog, err := monitoring.Catalog()
	must(t, err)
	known := make(map[string]bool)
	for _, m := range catalog {
		known[m.Name] = true
	}
	shown := 0
	for _, found := range regexp.MustCompile(`(?m)^# TYPE (\S+) `).FindAllStringSubmatch(body, -1) {
		name := found[1]
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
			continue
		}
		shown++
		if !known[name] {
			t.Errorf("%s is not in the catalog of internal/monitoring", name)
		}
	}
	if shown < 8 {
		t.Errorf("only %d metrics are shown:\n%s", shown, body)
	}
	for _, want := range []string{
		`crust_proxy_handler_healthy{handler="kata"} 1`, "crust_proxy_config_last_reload_successful 1", "crust_proxy_records_unusable 0",
		`crust_proxy_volumes{driver="`,
	} {
		if !strings.Contains(body, "\n"+want) {
			t.Errorf("%s is not shown:\n%s", want, body)
		}
	}
	unstage(t, d, req)
	d.WantClean()
}
