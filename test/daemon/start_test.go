//go:build system

package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
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
	told := fmt.Sprint(check.Value(d.Admin().ListEvents(t.Context(), &adminv1.ListEventsRequest{Volume: first.GetVolumeTargetPath()}))(t))
	check.That(t, strings.Count(told, "what:\"published\"") < 2, "repeated stages are told: %s", told)
	roots := strings.Replace(d.Config(), "roots: [/dev,", "roots: [/nowhere,", 1)
	check.Must(t, os.WriteFile(d.Dir+"/config.yaml", []byte(roots), 0o600))
	check.Eventually(t, "the mended file is in force", func() bool { return strings.Contains(d.Log(), "configuration reloaded") })
	wantConfig(t, d, "1")
	check.Code(t, check.Err(d.Runtime().RuntimeStageVolume(t.Context(), second)), codes.PermissionDenied)
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
	body := check.Value(d.HTTP("/metrics"))(t)
	since := strings.Contains(body, "\ncrust_proxy_config_bad_since_timestamp_seconds 0\n")
	check.That(t, strings.Contains(body, "\ncrust_proxy_config_last_reload_successful "+good+"\n") && since == (good == "1"),
		"the metrics are wrong:\n%s", body)
}

// TestStartBesideUnreadableRecords: whichever file cannot be read, the daemon starts,
// serves the rest, and names the file.
func TestStartBesideUnreadableRecords(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	d.Start()
	good, bad := d.StageRequest("pod-1", rig.Disk(t, 16*mib, "ext4")), d.StageRequest("pod-2", rig.Disk(t, 16*mib, "ext4"))
	stage(t, d, good)
	stage(t, d, bad)
	id := shown(t, d, bad.GetVolumeTargetPath()).GetId()
	d.Kill()
	state := filepath.Join(d.Dir, "run", "state")
	check.Must(t, os.Truncate(filepath.Join(state, "volumes", id+".json"), 40))
	check.Must(t, os.MkdirAll(filepath.Join(state, "csi"), 0o700))
	files := map[string]string{
		"volumes/stray": "x", "removing/stray.json": `{"version":7}`, "tmp/stray/file": "x", "csi/stray.json": "{", "csi/newer.json": `{"version":7}`,
	}
	for name, content := range files {
		check.Must(t, os.MkdirAll(filepath.Dir(filepath.Join(state, name)), 0o700))
		check.Must(t, os.WriteFile(filepath.Join(state, name), []byte(content), 0o600))
	}
	for range 2 {
		d.Start()
		node := check.Value(d.Admin().GetNode(t.Context(), &adminv1.GetNodeRequest{}))(t)
		findings := strings.Join(node.GetFindings(), "\n")
		check.Says(t, "the findings", findings, id+".json", "removing/stray.json", "csi/stray.json", "csi/newer.json")
		v := shown(t, d, bad.GetVolumeTargetPath())
		check.That(t, v.GetState() == adminv1.VolumeState_VOLUME_STATE_DEGRADED, "shown as %v", v)
		v = shown(t, d, good.GetVolumeTargetPath())
		check.That(t, v.GetState() == adminv1.VolumeState_VOLUME_STATE_PUBLISHED, "the other volume is shown as %v", v)
		records := metric(t, d, "crust_proxy_records_unusable")
		check.That(t, records >= 2, "%v records are counted as unusable", records)
		for _, one := range []string{
			`volumes{driver="disk.example.com",handler="kata",state="published"}`,
			`volumes{driver="unknown",handler="kata",state="degraded"}`, `handler_healthy{handler="kata"}`,
		} {
			check.Equal(t, metric(t, d, "crust_proxy_"+one), 1, "%s is", one)
		}
		d.Kill()
	}
	d.Start()
	unstage(t, d, good)
	unstage(t, d, bad)
	check.Must(t, os.RemoveAll(filepath.Join(state, "bad")))
	for name := range files {
		check.Must(t, os.RemoveAll(filepath.Join(state, name)))
	}
	check.Must(t, os.RemoveAll(filepath.Join(state, "tmp", "stray")))
	d.WantClean()
}

// TestStartWithoutFreeInodes: somebody has used up all of /run's inodes. The daemon
// starts, serves what is there, and volumes can go.
func TestStartWithoutFreeInodes(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	d.Start()
	req := d.StageRequest("pod-1", rig.Disk(t, 16*mib, "ext4"))
	stage(t, d, req)
	d.Kill()
	rig.UseUpInodes(d)
	d.Start()
	shown(t, d, req.GetVolumeTargetPath())
	unstage(t, d, req)
	d.WantClean()
}
