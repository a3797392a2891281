//go:build system

package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// guest mounts a claimed device as a VMM and its guest do: through a loop device of its own over it, until its end.
func guest(t *testing.T, disk string) (dir string, end func()) {
	t.Helper()
	loop, dir := rig.Loop(t, disk, loopdev.Options{}), t.TempDir()
	check.Must(t, unix.Mount(loop, dir, "ext4", 0, ""))
	end = sync.OnceFunc(func() { check.Must(t, unix.Unmount(dir, 0)) })
	t.Cleanup(end)
	return dir, end
}

// boot starts an emulated Go shim that has the volume.
func boot(t *testing.T, d *rig.Daemon, id, target, disk, mounted string) *kata.Shim {
	t.Helper()
	return kata.Bind(t, d, id, target, map[string]kata.Statfs{disk: kata.MountedAt(mounted)})
}

// stage repeats an ABORTED call: daemons of other tests look at all loop devices.
func stage(t *testing.T, d *rig.Daemon, req *runtimev1.RuntimeStageVolumeRequest) {
	t.Helper()
	check.Retried(t, "stage", func() error {
		_, err := d.Runtime().RuntimeStageVolume(t.Context(), req)
		return err
	})
}

func shown(t *testing.T, d *rig.Daemon, target string) *adminv1.Volume {
	t.Helper()
	reply := check.Value(d.Admin().GetVolume(t.Context(), &adminv1.GetVolumeRequest{Volume: target}))(t)
	return reply.GetVolume()
}

// TestVolumesOfOtherProgramsAreAdopted: their devices are no other pod's, also after a restart, and unstaging
// one changes nothing.
func TestVolumesOfOtherProgramsAreAdopted(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	disk, target := rig.Disk(t, 32*mib, "ext4"), d.Target("foreign")
	info := kata.VolumeDir(d.Kata, target) + "/mountInfo.json"
	check.Must(t, os.Mkdir(filepath.Dir(info), 0o700))
	check.Must(t, os.WriteFile(info, []byte(`{"volume-type":"directvol","device":"`+disk+`","fstype":"ext4"}`), 0o600))
	for range 2 {
		d.Start()
		check.Code(t, check.Err(d.Runtime().RuntimeStageVolume(t.Context(), d.StageRequest("pod-2", disk))), codes.FailedPrecondition)
		check.Must(t, check.Err(d.Runtime().RuntimeUnstageVolume(t.Context(), &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: target})))
		d.Kill()
	}
	check.Must(t, check.Err(os.Stat(info)))
}

// Kata's agent calls every filesystem healthy. What an ext4 has on record of
// itself is read from its device, while it is mounted and when it leaves.
func TestErrorsOnRecordAreShown(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	d.Start()
	for name, broken := range map[string]bool{"whole": false, "broken": true} {
		disk := rig.Disk(t, 64*mib, "ext4")
		if broken {
			rig.RecordErrors(t, disk)
		}
		req := d.StageRequest("pod-"+name, disk)
		target := req.GetVolumeTargetPath()
		stage(t, d, req)
		mounted, end := guest(t, disk)
		shim := boot(t, d, "sandbox-"+name, target, disk, mounted)
		const words = "errors on record since 2026-01-02T03:04:05Z"
		check.Eventually(t, "the reply says what is known", func() bool { // it waits 200 ms for the device
			reply := check.Value(d.Runtime().RuntimeGetVolumeStats(t.Context(), &runtimev1.RuntimeGetVolumeStatsRequest{VolumeTargetPath: target}))(t)
			said := reply.GetVolumeCondition()
			return !broken && said == nil || broken && said.GetAbnormal() && strings.Contains(said.GetMessage(), words)
		})
		got := shown(t, d, target).GetCondition()
		check.That(t, got.GetAbnormal() == broken, "%s: it is shown as %v", name, got)
		check.Must(t, shim.Stop())
		end()
		unstage(t, d, req)
		if broken {
			check.Eventually(t, "the log says so when it left", func() bool { return strings.Contains(d.Log(), "given back with errors on record") })
		}
	}
	left := metric(t, d, `crust_proxy_volumes_left_with_errors_total{driver="disk.example.com",handler="kata"}`)
	check.That(t, left == 1, "%v volumes are counted that left with errors", left)
}
