//go:build system

package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestSecondStart: a daemon that cannot start with its file opens records and history again, for the file that was
// accepted before, in one process. The stages that its caller repeats meanwhile are one event.
func TestSecondStart(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	d.Accepted = d.Dir + "/accepted.yaml"
	d.Start()
	check.Succeeds(t, "the file is kept", func() error { return check.Err(os.Stat(d.Accepted)) })
	first, second := d.StageRequest("pod-1", rig.Disk(t, 16*mib, "ext4")), d.StageRequest("pod-2", rig.Disk(t, 16*mib, "ext4"))
	stage(t, d, first)
	for _, bad := range []struct{ handlers, socket, says string }{
		{handlers: "crust: {enabled: true, root: /proc/no}", says: "/proc/no"},
		{socket: `, mode: "0660", group: no-such-group`, says: "no-such-group"},
	} {
		d.Handlers, d.SocketOptions = bad.handlers, bad.socket
		d.Stop() // with a kill, the last event may be lost
		d.Start()
		node := check.Value(d.Admin().GetNode(t.Context(), &adminv1.GetNodeRequest{}))(t)
		check.Says(t, "the errors", strings.Join(node.GetErrors(), "\n"), "is bad since", "accepted at", bad.says)
		stage(t, d, first)
		stage(t, d, second)
		unstage(t, d, second)
	}
	for req, want := range map[*runtimev1.RuntimeStageVolumeRequest]int{first: 1, second: 2} {
		events := check.Value(d.Admin().ListEvents(t.Context(), &adminv1.ListEventsRequest{Volume: req.GetVolumeTargetPath()}))(t)
		check.Equal(t, strings.Count(fmt.Sprint(events), `what:"published"`), want, "published events in %v", events)
	}
	unstage(t, d, first)
	d.WantClean()
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
