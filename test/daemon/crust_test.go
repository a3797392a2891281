//go:build system

package daemon

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// fakeRuntime is the program of a runtime whose sandboxes are processes with a
// mount namespace of their own: it asks the filesystem through /proc.
const fakeRuntime = `#!/bin/sh
set -e
key=$(printf %%s "$3" | sha256sum | cut -c1-64)
read -r pid point < "%[1]s/sandboxes/$key" || { echo "no sandbox has $3" >&2; exit 3; }
set -- "$2" "$4" $(stat -f -c '%%S %%b %%f %%c %%d' "/proc/$pid/root$point")
case $1 in
stats) echo "{\"usage\":[{\"unit\":\"BYTES\",\"total\":$(($3*$4)),\"available\":$(($3*$5)),\"used\":$(($3*($4-$5)))},` +
	`{\"unit\":\"INODES\",\"total\":$6,\"available\":$7,\"used\":$(($6-$7))}]}" ;;
resize) echo "{\"capacity_bytes\":$2}" ;;
*) exit 4 ;;
esac
`

// newCrust lays out a daemon with the handler of the directory ABI, and with Kata's
// too where it is wanted.
func newCrust(t *testing.T, kata bool) *rig.Daemon {
	t.Helper()
	d := rig.NewDaemon(t)
	program := d.Dir + "/fake-runtime"
	check.Must(t, os.WriteFile(program, fmt.Appendf(nil, fakeRuntime, d.Dir), 0o600))
	check.Must(t, os.Chmod(program, 0o755))
	check.Must(t, os.Mkdir(d.Dir+"/sandboxes", 0o700))
	d.Handlers = fmt.Sprintf("default: crust\ncrust: {enabled: true, root: %[1]s/crust, programs: [%[1]s/fake-runtime], socketDirs: [%[1]s/s]}", d.Dir)
	if !kata {
		d.Handlers = strings.Replace(d.Handlers, "default: crust\n", "", 1)
		d.KataOff = true
	}
	return d
}

func keyOf(target string) string {
	sum := sha256.Sum256([]byte(target))
	return hex.EncodeToString(sum[:])
}

// mountInSandbox mounts the device in a process of its own, and tells of it as a
// runtime does.
func mountInSandbox(t *testing.T, d *rig.Daemon, id, target, disk string) (end func()) {
	t.Helper()
	point := t.TempDir()
	cmd := exec.Command("sh", "-c", `mount "$0" "$1" && echo mounted && cat`, disk, point)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	stdin, err := cmd.StdinPipe()
	check.Must(t, err)
	stdout, err := cmd.StdoutPipe()
	check.Must(t, err)
	check.Must(t, cmd.Start())
	_, err = io.ReadFull(stdout, make([]byte, 8))
	check.Must(t, err)
	state := filepath.Join(d.Dir, "sandboxes", keyOf(target))
	check.Must(t, os.WriteFile(state, fmt.Appendf(nil, "%d %s\n", cmd.Process.Pid, point), 0o600))
	dir := filepath.Join(d.Dir, "crust", keyOf(target))
	for name, content := range map[string]string{"runtime-cli": d.Dir + "/fake-runtime\n", id: "{}"} {
		check.Must(t, os.WriteFile(dir+"/."+name, []byte(content), 0o600))
		check.Must(t, os.Rename(dir+"/."+name, dir+"/"+name))
	}
	end = sync.OnceFunc(func() {
		if err := errors.Join(os.Remove(state), stdin.Close(), cmd.Wait()); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(end)
	return end
}

func TestWholeWayWithTheDirectoryABI(t *testing.T) {
	t.Parallel()
	d := newCrust(t, false)
	d.Start()
	disk := rig.Disk(t, 64*mib, "ext4")
	req := d.StageRequest("pod-1", disk)
	target := req.GetVolumeTargetPath()
	stage(t, d, req)
	wantClaimed(t, disk, false)
	_, err := volumeStats(t.Context(), d, target)
	check.Code(t, err, codes.Unavailable)

	end := mountInSandbox(t, d, "sandbox-1", target, disk)
	check.Eventually(t, "bound", func() bool {
		v := shown(t, d, target)
		return v.GetState() == adminv1.VolumeState_VOLUME_STATE_BOUND && v.GetSandbox().GetId() == "sandbox-1"
	})
	wantUsage(t, d, target)
	grown, err := d.Runtime().RuntimeExpandVolume(t.Context(), &runtimev1.RuntimeExpandVolumeRequest{
		VolumeTargetPath: target, CapacityRange: &runtimev1.CapacityRange{RequiredBytes: 60 * mib},
	})
	check.Must(t, err)
	if grown.GetCapacityBytes() != 60*mib {
		t.Errorf("grown to %d", grown.GetCapacityBytes())
	}
	for _, other := range []string{"pod-1", "pod-2"} {
		_, err := d.Runtime().RuntimeStageVolume(t.Context(), d.StageRequest(other, disk))
		if other == "pod-1" {
			check.Must(t, err)
			continue
		}
		check.Code(t, err, codes.FailedPrecondition)
	}
	_, err = d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))
	check.Code(t, err, codes.Aborted)

	// A restart takes the volume up although its device is mounted.
	d.Kill()
	d.Start()
	wantUsage(t, d, target)
	if v := shown(t, d, target); v.GetState() != adminv1.VolumeState_VOLUME_STATE_BOUND {
		t.Errorf("after a restart: %v", v)
	}
	_, err = d.Runtime().RuntimeStageVolume(t.Context(), d.StageRequest("pod-2", disk))
	check.Code(t, err, codes.FailedPrecondition)

	// The sandbox of a living pod is made anew with no call at all.
	end()
	_, err = volumeStats(t.Context(), d, target)
	check.Code(t, err, codes.Unavailable)
	end = mountInSandbox(t, d, "sandbox-2", target, disk)
	wantUsage(t, d, target)
	if got := shown(t, d, target).GetSandbox().GetId(); got != "sandbox-2" {
		t.Errorf("the sandbox is %q", got)
	}
	end()
	unstage(t, d, req)
	wantGoneOfCrust(t, d, disk)
}

func wantUsage(t *testing.T, d *rig.Daemon, target string) {
	t.Helper()
	reply, err := volumeStats(t.Context(), d, target)
	check.Must(t, err)
	if len(reply.GetUsage()) != 2 || reply.GetUsage()[0].GetTotal() < 50*mib {
		t.Errorf("usage: %v", reply.GetUsage())
	}
}

func wantGoneOfCrust(t *testing.T, d *rig.Daemon, disk string) {
	t.Helper()
	left, err := filepath.Glob(d.Dir + "/crust/*")
	check.Must(t, err)
	if len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	wantGone(t, d, disk)
}

func TestKilledAtEveryStepOfTheDirectoryABI(t *testing.T) {
	for _, step := range []string{"stage-claimed", "crust-directory-made", "crust-built", "stage-published"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			d := newCrust(t, true)
			disk := rig.Disk(t, 16*mib, "ext4")
			req := d.StageRequest("pod-1", disk)
			d.Start("CRUST_FAILPOINTS=" + step + "=kill")
			_, err := d.Runtime().RuntimeStageVolume(t.Context(), req)
			diedAt(t, d, err)
			d.Start()
			stage(t, d, req)
			unstage(t, d, req)
			wantGoneOfCrust(t, d, disk)
		})
	}
	for _, step := range []string{"unstage-begun", "crust-taken-away", "unstage-released"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			d := newCrust(t, true)
			disk := rig.Disk(t, 16*mib, "ext4")
			req := d.StageRequest("pod-1", disk)
			d.Start("CRUST_FAILPOINTS=" + step + "=kill")
			stage(t, d, req)
			_, err := d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))
			diedAt(t, d, err)
			d.Start()
			wantGoneOfCrust(t, d, disk)
		})
	}
}

func TestImageFileIsRefusedByTheDirectoryABI(t *testing.T) {
	t.Parallel()
	d := newCrust(t, true)
	d.Start()
	image := d.Images + "/disk"
	check.Must(t, os.WriteFile(image, make([]byte, mib), 0o600))
	_, err := d.Runtime().RuntimeStageVolume(t.Context(), d.StageRequest("pod-1", image))
	check.Code(t, err, codes.Unimplemented)
	if !strings.Contains(err.Error(), "loop device") {
		t.Errorf("the error gives no advice: %v", err)
	}
	d.WantClean()
}
