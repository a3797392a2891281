//go:build system

package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

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
