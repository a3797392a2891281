//go:build system

package daemon

import (
	"context"
	"encoding/base64"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/internal/kataemu"
	"github.com/crust-proxy/crust-proxy/internal/loopdev"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/harness"
)

// guest mounts a claimed device as a VMM and its guest do: through a loop device
// of its own over it.
func guest(t *testing.T, disk string) string {
	t.Helper()
	loop := harness.Loop(t, disk, loopdev.Options{})
	dir := t.TempDir()
	must(t, unix.Mount(loop, dir, "ext4", 0, ""))
	t.Cleanup(func() { must(t, unix.Unmount(dir, 0)) })
	return dir
}

// boot starts an emulated Go shim that has the volume.
func boot(t *testing.T, d *harness.Daemon, id, target, disk, mounted string) *kataemu.Shim {
	t.Helper()
	shim, err := kataemu.Start(kataemu.Options{
		Flavor: kataemu.Go, SandboxID: id, Sandboxes: d.GoSandboxes,
		Mounts: map[string]kataemu.Statfs{disk: kataemu.MountedAt(mounted)},
	})
	must(t, err)
	t.Cleanup(func() { _ = shim.Stop() })
	must(t, os.WriteFile(filepath.Join(volumeDir(d, target), id), nil, 0o600))
	return shim
}

func volumeDir(d *harness.Daemon, target string) string {
	return filepath.Join(d.Kata, base64.URLEncoding.EncodeToString([]byte(target)))
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		if is() {
			return
		}
	}
	t.Fatal("never: " + what)
}

func stage(t *testing.T, d *harness.Daemon, req *runtimev1.RuntimeStageVolumeRequest) {
	t.Helper()
	_, err := d.Runtime().RuntimeStageVolume(t.Context(), req)
	must(t, err)
}

func volumeStats(ctx context.Context, d *harness.Daemon, target string) (*runtimev1.RuntimeGetVolumeStatsResponse, error) {
	return d.Runtime().RuntimeGetVolumeStats(ctx, &runtimev1.RuntimeGetVolumeStatsRequest{VolumeTargetPath: target})
}

func shown(t *testing.T, d *harness.Daemon, target string) *adminv1.Volume {
	t.Helper()
	reply, err := d.Admin().GetVolume(t.Context(), &adminv1.GetVolumeRequest{Volume: target})
	must(t, err)
	return reply.GetVolume()
}

func TestWholeWayWithTheGoRuntime(t *testing.T) {
	d := harness.NewDaemon(t)
	d.Start()
	disk := harness.Disk(t, 64*mib, "ext4")
	req := d.StageRequest("pod-1", disk)
	target := req.GetVolumeTargetPath()
	stage(t, d, req)
	_, err := volumeStats(t.Context(), d, target)
	wantCode(t, err, codes.Unavailable)

	mounted := guest(t, disk)
	must(t, os.WriteFile(mounted+"/data", make([]byte, 5*mib), 0o600))
	first := boot(t, d, "sandbox-1", target, disk, mounted)
	eventually(t, "bound", func() bool {
		v := shown(t, d, target)
		return v.GetState() == adminv1.VolumeState_VOLUME_STATE_BOUND && v.GetSandbox().GetId() == "sandbox-1"
	})
	wantStatfs(t, d, target, mounted)

	_, err = d.Runtime().RuntimeExpandVolume(t.Context(), &runtimev1.RuntimeExpandVolumeRequest{VolumeTargetPath: target})
	wantCode(t, err, codes.Unimplemented)
	_, err = d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))
	wantCode(t, err, codes.Aborted)
	if !strings.Contains(err.Error(), "sandbox-1") {
		t.Errorf("the error does not name the sandbox: %v", err)
	}

	// The sandbox dies and the pod gets a new one; the dead one's id stays in
	// Kata's directory and sorts first.
	must(t, first.Kill())
	_, err = volumeStats(t.Context(), d, target)
	wantCode(t, err, codes.Unavailable)
	second := boot(t, d, "sandbox-2", target, disk, mounted)
	wantStatfs(t, d, target, mounted)
	if got := shown(t, d, target).GetSandbox().GetId(); got != "sandbox-2" {
		t.Errorf("the sandbox is %q", got)
	}
	d.Kill()
	d.Start()
	wantStatfs(t, d, target, mounted)
	must(t, second.Stop())
	unstage(t, d, req)
	d.WantClean()
}

// wantStatfs compares stats with what statfs says in the sandbox.
func wantStatfs(t *testing.T, d *harness.Daemon, target, mounted string) {
	t.Helper()
	reply, err := volumeStats(t.Context(), d, target)
	must(t, err)
	var st unix.Statfs_t
	must(t, unix.Statfs(mounted, &st))
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

func TestHungSandboxDelaysNoOtherVolume(t *testing.T) {
	d := harness.NewDaemon(t)
	d.Start()
	disks := []string{harness.Disk(t, 32*mib, "ext4"), harness.Disk(t, 32*mib, "ext4")}
	var targets []string
	var shims []*kataemu.Shim
	for i, disk := range disks {
		req := d.StageRequest([]string{"pod-hung", "pod-well"}[i], disk)
		stage(t, d, req)
		targets = append(targets, req.GetVolumeTargetPath())
		shims = append(shims, boot(t, d, []string{"hung", "well"}[i], targets[i], disk, guest(t, disk)))
	}
	shims[0].SetFault(kataemu.Hang)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := volumeStats(ctx, d, targets[0])
		done <- err
	}()
	answered := 0
	for ctx.Err() == nil {
		if _, err := volumeStats(t.Context(), d, targets[1]); err != nil {
			t.Fatal(err)
		}
		answered++
	}
	wantCode(t, <-done, codes.DeadlineExceeded)
	if answered < 10 {
		t.Errorf("only %d answers beside a hung sandbox", answered)
	}
}

func TestVolumesOfOtherProgramsAreAdopted(t *testing.T) {
	d := harness.NewDaemon(t)
	d.Start()
	disk := harness.Disk(t, 32*mib, "ext4")
	target := d.Target("foreign")
	must(t, os.MkdirAll(target, 0o750))
	dir := volumeDir(d, target)
	must(t, os.Mkdir(dir, 0o700))
	must(t, os.WriteFile(dir+"/mountInfo.json", []byte(`{"volume-type":"directvol","device":"`+disk+`","fstype":"ext4"}`), 0o600))
	eventually(t, "adopted", func() bool {
		reply, err := d.Admin().ListVolumes(t.Context(), &adminv1.ListVolumesRequest{State: adminv1.VolumeState_VOLUME_STATE_ADOPTED})
		return err == nil && len(reply.GetVolumes()) == 1
	})
	mounted := guest(t, disk)
	boot(t, d, "foreign-1", target, disk, mounted)
	wantStatfs(t, d, target, mounted)
	_, err := d.Runtime().RuntimeStageVolume(t.Context(), d.StageRequest("pod-2", disk))
	wantCode(t, err, codes.FailedPrecondition)
	_, err = d.Runtime().RuntimeUnstageVolume(t.Context(), &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: target})
	must(t, err)
	_, err = d.Admin().Reconcile(t.Context(), &adminv1.ReconcileRequest{})
	must(t, err)
	d.Kill()
	d.Start()
	if _, err := os.Stat(dir + "/mountInfo.json"); err != nil {
		t.Errorf("a foreign volume was removed: %v", err)
	}
	wantStatfs(t, d, target, mounted)
}
