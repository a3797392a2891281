//go:build system

package daemon

import (
	"context"
	"os"
	"os/exec"
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

// guest mounts a claimed device as a VMM and its guest do: through a loop device of its own over it,
// until its end.
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

func stage(t *testing.T, d *rig.Daemon, req *runtimev1.RuntimeStageVolumeRequest) {
	t.Helper()
	_, err := d.Runtime().RuntimeStageVolume(t.Context(), req)
	check.Must(t, err)
}

func volumeStats(ctx context.Context, d *rig.Daemon, target string) (*runtimev1.RuntimeGetVolumeStatsResponse, error) {
	return d.Runtime().RuntimeGetVolumeStats(ctx, &runtimev1.RuntimeGetVolumeStatsRequest{VolumeTargetPath: target})
}

func shown(t *testing.T, d *rig.Daemon, target string) *adminv1.Volume {
	t.Helper()
	reply, err := d.Admin().GetVolume(t.Context(), &adminv1.GetVolumeRequest{Volume: target})
	check.Must(t, err)
	return reply.GetVolume()
}

func TestWholeWayWithTheGoRuntime(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	d.Start()
	disk := rig.Disk(t, 64*mib, "ext4")
	req := d.StageRequest("pod-1", disk)
	target := req.GetVolumeTargetPath()
	stage(t, d, req)
	_, err := volumeStats(t.Context(), d, target)
	check.Code(t, err, codes.Unavailable)

	mounted, end := guest(t, disk)
	check.Must(t, os.WriteFile(mounted+"/data", make([]byte, 5*mib), 0o600))
	first := boot(t, d, "sandbox-1", target, disk, mounted)
	check.Eventually(t, "bound", func() bool {
		v := shown(t, d, target)
		return v.GetState() == adminv1.VolumeState_VOLUME_STATE_BOUND && v.GetSandbox().GetId() == "sandbox-1"
	})
	wantStatfs(t, d, target, mounted)

	_, err = d.Runtime().RuntimeExpandVolume(t.Context(), &runtimev1.RuntimeExpandVolumeRequest{VolumeTargetPath: target})
	check.Code(t, err, codes.Unimplemented)
	_, err = d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))
	check.Code(t, err, codes.Aborted)
	if !strings.Contains(err.Error(), "sandbox-1") {
		t.Errorf("the error does not name the sandbox: %v", err)
	}

	// The sandbox dies and the pod gets a new one; the dead one's id stays in
	// Kata's directory and sorts first.
	check.Must(t, first.Kill())
	_, err = volumeStats(t.Context(), d, target)
	check.Code(t, err, codes.Unavailable)
	second := boot(t, d, "sandbox-2", target, disk, mounted)
	wantStatfs(t, d, target, mounted)
	if got := shown(t, d, target).GetSandbox().GetId(); got != "sandbox-2" {
		t.Errorf("the sandbox is %q", got)
	}
	d.Kill()
	d.Start()
	wantStatfs(t, d, target, mounted)
	check.Must(t, second.Stop())
	_, err = d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))
	check.Code(t, err, codes.Aborted) // the machine outlives its shim
	end()
	unstage(t, d, req)
	d.WantClean()
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
		_, err := d.Runtime().RuntimeStageVolume(t.Context(), d.StageRequest("pod-2", disk))
		check.Code(t, err, codes.FailedPrecondition)
		_, err = d.Runtime().RuntimeUnstageVolume(t.Context(), &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: target})
		check.Must(t, err)
		d.Kill()
	}
	_, err := os.Stat(info)
	check.Must(t, err)
}

// A containerd that is away says nothing of a sandbox of runtime-rs, which leaves no
// id with its volume: as long as one lives that may have the volume, it stays.
func TestRuntimeAwayKeepsTheVolume(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	d.Containerd = d.Dir + "/containerd.sock" // nobody listens
	d.Start()
	disk := rig.Disk(t, 64*mib, "ext4")
	req := d.StageRequest("pod-1", disk)
	stage(t, d, req)
	shim, err := kata.Start(kata.Options{Flavor: kata.Rust, SandboxID: "sandbox-1", Sandboxes: d.RustSandboxes})
	check.Must(t, err)
	t.Cleanup(func() { _ = shim.Stop() })
	for range 2 {
		_, err := d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))
		check.Code(t, err, codes.Aborted)
		if !strings.Contains(err.Error(), "sandbox-1") || !strings.Contains(err.Error(), d.Containerd) {
			t.Errorf("the error does not name the sandbox and the container runtime: %v", err)
		}
		d.Kill()
		d.Start()
	}
	check.Must(t, shim.Stop())
	unstage(t, d, req) // no Kata sandbox is left on the node
	d.WantClean()
}

// wantStatfs compares stats with what statfs says in the sandbox.
func wantStatfs(t *testing.T, d *rig.Daemon, target, mounted string) {
	t.Helper()
	reply, err := volumeStats(t.Context(), d, target)
	check.Must(t, err)
	var st unix.Statfs_t
	check.Must(t, unix.Statfs(mounted, &st))
	for _, u := range reply.GetUsage() {
		switch u.GetUnit() {
		case runtimev1.VolumeUsage_BYTES:
			if u.GetTotal() != int64(st.Blocks)*st.Bsize || u.GetAvailable() != int64(st.Bfree)*st.Bsize {
				t.Errorf("bytes: %v; statfs: %+v", u, st)
			}
		case runtimev1.VolumeUsage_INODES:
			if u.GetTotal() != int64(st.Files) || u.GetAvailable() != int64(st.Ffree) {
				t.Errorf("inodes: %v; statfs: %+v", u, st)
			}
		}
	}
	if len(reply.GetUsage()) != 2 {
		t.Errorf("usage: %v", reply.GetUsage())
	}
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
			for _, value := range []string{"error_count 2", "first_error_time 20260102030405", "last_error_func ext4_find_entry"} {
				out, err := exec.Command("debugfs", "-w", "-R", "set_super_value "+value, disk).CombinedOutput()
				if err != nil {
					t.Fatalf("%v: %s", err, out)
				}
			}
		}
		req := d.StageRequest("pod-"+name, disk)
		target := req.GetVolumeTargetPath()
		stage(t, d, req)
		mounted, end := guest(t, disk)
		shim := boot(t, d, "sandbox-"+name, target, disk, mounted)
		reply, err := volumeStats(t.Context(), d, target)
		check.Must(t, err)
		const words = "errors on record since 2026-01-02T03:04:05Z"
		said := reply.GetVolumeCondition()
		if !broken && said != nil {
			t.Errorf("of a whole filesystem nothing is known, and the reply says %v", said)
		}
		if broken && (!said.GetAbnormal() || !strings.Contains(said.GetMessage(), words)) {
			t.Errorf("of a broken filesystem the reply says %v", said)
		}
		if got := shown(t, d, target).GetCondition(); got.GetAbnormal() != broken {
			t.Errorf("%s: it is shown as %v", name, got)
		}
		check.Must(t, shim.Stop())
		end()
		unstage(t, d, req)
		if broken {
			check.Eventually(t, "the log says so when it left", func() bool { return strings.Contains(d.Log(), "given back with errors on record") })
		}
	}
	metrics, err := d.HTTP("/metrics")
	check.Must(t, err)
	if !strings.Contains(metrics, "crust_proxy_volumes_left_with_errors_total{") {
		t.Error("the metric of volumes that left with errors is not there")
	}
}
