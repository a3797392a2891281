//go:build system

package daemon

import (
	"os"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestBadFileIsNoOutage: the daemon is killed after its file was spoiled, and the next one serves with
// what was accepted, whether the file is invalid or the daemon cannot start with it.
func TestBadFileIsNoOutage(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	d.Accepted = d.Dir + "/lib/accepted.yaml"
	d.Start()
	check.Succeeds(t, "the file is kept", func() error { _, err := os.Stat(d.Accepted); return err })
	first, second := d.StageRequest("pod-1", rig.Disk(t, 16*mib, "ext4")), d.StageRequest("pod-2", rig.Disk(t, 16*mib, "ext4"))
	stage(t, d, first)
	for _, bad := range []struct{ extra, handlers, socket, says string }{
		{extra: "nonsense: true", says: "nonsense: unknown key"},
		{handlers: "crust: {enabled: true, root: /proc/no}", says: "/proc/no"},
		{socket: `, mode: "0660", group: no-such-group`, says: "no-such-group"},
		{extra: "front: {enabled: true, registry: /proc/no}", says: "/proc/no"},
	} {
		d.Extra, d.Handlers, d.SocketOptions = bad.extra, bad.handlers, bad.socket
		for range 2 {
			d.Kill()
			d.Start()
			wantConfig(t, d, "0", "is bad since", "accepted at", bad.says)
		}
		stage(t, d, first) // as its caller repeats it
		stage(t, d, second)
		unstage(t, d, second)
	}
	d.Extra, d.Handlers, d.SocketOptions = "", "", ""
	d.ConfigFile()
	check.Eventually(t, "the mended file is in force", func() bool { return strings.Contains(d.Log(), "configuration reloaded") })
	wantConfig(t, d, "1")
	unstage(t, d, first)
	d.WantClean()
}

// wantConfig wants crustctl and the metric to say this of the configuration file.
func wantConfig(t *testing.T, d *rig.Daemon, good string, says ...string) {
	t.Helper()
	var said strings.Builder
	for _, command := range []string{"version", "doctor", "top --once"} {
		out, _ := d.Crustctl(strings.Fields(command)...).CombinedOutput() // doctor fails if it finds something
		said.Write(out)
		bad := strings.Contains(string(out), "is bad since")
		check.That(t, bad == (good == "0"), "crustctl %s:\n%s", command, out)
	}
	check.Says(t, "crustctl", said.String(), says...)
	body, err := d.HTTP("/metrics")
	check.Must(t, err)
	if since := strings.Contains(body, "\ncrust_proxy_config_bad_since_timestamp_seconds 0\n"); !strings.Contains(body,
		"\ncrust_proxy_config_last_reload_successful "+good+"\n") || since != (good == "1") {
		t.Errorf("the metrics are wrong:\n%s", body)
	}
}
