//go:build system

package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestKEPRules shows the rules of KEP-2857 that concern the Runtime API.
func TestKEPRules(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	d.Start()
	client := d.Runtime()
	disk, blank := rig.Disk(t, 16*mib, "ext4"), rig.Disk(t, 16*mib, "")

	t.Run("1 what cannot be deferred is an error and nothing is mounted", func(t *testing.T) {
		for name, change := range map[string]func(*runtimev1.RuntimeStageVolumeRequest){
			"filesystem": func(r *runtimev1.RuntimeStageVolumeRequest) { r.FsType = "zfs" },
			"another":    func(r *runtimev1.RuntimeStageVolumeRequest) { r.FsType = "xfs" },
			"blank":      func(r *runtimev1.RuntimeStageVolumeRequest) { r.VolumeBackingPath = blank },
			"network":    func(r *runtimev1.RuntimeStageVolumeRequest) { r.VolumeType.Type = runtimev1.VolumeType_NETWORK },
			"bind":       func(r *runtimev1.RuntimeStageVolumeRequest) { r.MountFlags = []string{"bind"} },
			"group":      func(r *runtimev1.RuntimeStageVolumeRequest) { r.VolumeSupplementalGroup = "0" },
		} {
			req := d.StageRequest("pod-1", disk)
			change(req)
			_, err := client.RuntimeStageVolume(t.Context(), req)
			if err == nil || !strings.Contains(err.Error(), req.GetVolumeTargetPath()) {
				t.Errorf("%s: %v", name, err)
			}
		}
		d.WantClean()
	})
	t.Run("2 the host stays free of the filesystem", func(t *testing.T) {
		req := d.StageRequest("pod-1", disk)
		_, err := client.RuntimeStageVolume(t.Context(), req)
		check.Must(t, err)
		raw, err := os.ReadFile("/proc/self/mountinfo")
		check.Must(t, err)
		if strings.Contains(string(raw), disk+" ") {
			t.Error("the device is mounted on the host")
		}
		unstage(t, d, req)
	})
	t.Run("4 a policy without a group", func(t *testing.T) {
		req := d.StageRequest("pod-1", disk)
		req.VolumeSupplementalGroupChangePolicy = runtimev1.VolumeSupplementalGroupChangePolicy_ALWAYS
		_, err := client.RuntimeStageVolume(t.Context(), req)
		check.Code(t, err, codes.InvalidArgument)
	})
	t.Run("5 unstage is idempotent and leaves nothing", func(t *testing.T) {
		req := d.StageRequest("pod-1", disk)
		unstage(t, d, req)
		_, err := client.RuntimeStageVolume(t.Context(), req)
		check.Must(t, err)
		unstage(t, d, req)
		unstage(t, d, req)
		d.WantClean()
	})
	t.Run("6 the second pod is refused", func(t *testing.T) {
		first, second := d.StageRequest("pod-1", disk), d.StageRequest("pod-2", disk)
		_, err := client.RuntimeStageVolume(t.Context(), first)
		check.Must(t, err)
		_, err = client.RuntimeStageVolume(t.Context(), second)
		check.Code(t, err, codes.FailedPrecondition)
		unstage(t, d, first)
		_, err = client.RuntimeStageVolume(t.Context(), second)
		check.Must(t, err)
		unstage(t, d, second)
	})
	t.Run("7 stats and growth of an unknown volume", func(t *testing.T) {
		target := d.Target("pod-1")
		_, err := client.RuntimeGetVolumeStats(t.Context(), &runtimev1.RuntimeGetVolumeStatsRequest{VolumeTargetPath: target})
		check.Code(t, err, codes.NotFound)
		_, err = client.RuntimeExpandVolume(t.Context(), &runtimev1.RuntimeExpandVolumeRequest{VolumeTargetPath: target})
		check.Code(t, err, codes.NotFound)
	})
	t.Run("8 the same stage again changes nothing", func(t *testing.T) {
		req := d.StageRequest("pod-1", disk)
		_, err := client.RuntimeStageVolume(t.Context(), req)
		check.Must(t, err)
		before := inodes(t, d)
		_, err = client.RuntimeStageVolume(t.Context(), req)
		check.Must(t, err)
		d.Kill()
		d.Start()
		client = d.Runtime()
		_, err = client.RuntimeStageVolume(t.Context(), req)
		check.Must(t, err)
		if after := inodes(t, d); after != before {
			t.Errorf("files were written again: %v, then %v", before, after)
		}
		unstage(t, d, req)
	})
	t.Run("10 the counter counts publishes", func(t *testing.T) {
		const counter = `volumes_published_with_deferred_ops_total{driver="disk.example.com",handler="kata"} `
		before := metric(t, d, counter)
		req := d.StageRequest("pod-1", disk)
		for range 3 { // once, and two repeats
			_, err := client.RuntimeStageVolume(t.Context(), req)
			check.Must(t, err)
		}
		unstage(t, d, req)
		if after := metric(t, d, counter); after != before+1 {
			t.Errorf("the counter went from %v to %v", before, after)
		}
	})
	d.WantClean()
}

// inodes tells the files of the one volume: a file that is written anew has
// another inode.
func inodes(t *testing.T, d *rig.Daemon) (found [2]uint64) {
	t.Helper()
	for i, pattern := range []string{d.Dir + "/run/state/volumes/*", d.Kata + "/*/mountInfo.json"} {
		files, err := filepath.Glob(pattern)
		check.Must(t, err)
		if len(files) != 1 {
			t.Fatalf("%s: %q", pattern, files)
		}
		var st unix.Stat_t
		check.Must(t, unix.Stat(files[0], &st))
		found[i] = st.Ino
	}
	return found
}
