//go:build system

package daemon

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestMetricsAreThoseThatAreListed: alerts and dashboard are checked against the table
// in docs/operations.md, so the real daemon must show nothing else, and what stands for
// the node's state.
func TestMetricsAreThoseThatAreListed(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	d.Start()
	req := d.StageRequest("pod-1", rig.Disk(t, 16*mib, "ext4"))
	_, err := d.Runtime().RuntimeStageVolume(t.Context(), req)
	check.Must(t, err)
	body, err := d.HTTP("/metrics")
	check.Must(t, err)
	listed, err := os.ReadFile("../../docs/operations.md")
	check.Must(t, err)
	shown := 0
	for _, found := range regexp.MustCompile(`(?m)^# TYPE (\S+) (\w+)`).FindAllStringSubmatch(body, -1) {
		name := found[1]
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
			continue
		}
		shown++
		if !strings.Contains(string(listed), "| `"+name+"` |") {
			t.Errorf("docs/operations.md does not list %s", name)
		}
		if histogram := found[2] == "histogram"; histogram != strings.HasSuffix(name, "_duration_seconds") {
			t.Errorf("%s is a %s, and tools/prometheus knows histograms by the end of their names, _duration_seconds", name, found[2])
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
