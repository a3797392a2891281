//go:build system

package containerd

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

const (
	mib = 1 << 20
	// diskSize is large enough for every filesystem; the image is sparse.
	diskSize = 320 * mib
)

var filesystems = []string{"ext4", "xfs", "btrfs"}

// volume is a loop device with a filesystem, published for a pod.
type volume struct {
	r               *testNode
	fs, image, disk string
	target, pod     string
	name            string // of the PV; empty is "pv"
	flags           []string
	group           string
	policy          runtimev1.VolumeSupplementalGroupChangePolicy
}

// volume makes a device with a filesystem; it is not staged yet.
func (r *testNode) volume(pod, fs string, size int64) *volume {
	r.t.Helper()
	v := &volume{r: r, fs: fs, pod: pod, image: rig.Image(r.t, size)}
	rig.Mkfs(r.t, fs, v.image)
	v.disk = rig.Loop(r.t, v.image, loopdev.Options{})
	return v
}

func (r *testNode) staged(pod, fs string) *volume {
	r.t.Helper()
	v := r.volume(pod, fs, diskSize)
	v.stage()
	return v
}

func (v *volume) stage() {
	v.r.t.Helper()
	check.Must(v.r.t, v.tryStage())
}

func (v *volume) tryStage() error {
	request := v.r.d.StageRequest(v.pod, v.disk, v.flags...)
	if v.name != "" {
		request.VolumeTargetPath = strings.Replace(request.GetVolumeTargetPath(), "/pv/mount", "/"+v.name+"/mount", 1)
		check.Must(v.r.t, os.MkdirAll(filepath.Dir(request.GetVolumeTargetPath()), 0o750))
	}
	request.FsType, request.VolumeSupplementalGroup, request.VolumeSupplementalGroupChangePolicy = v.fs, v.group, v.policy
	v.target = request.GetVolumeTargetPath()
	_, err := v.r.d.Runtime().RuntimeStageVolume(v.r.ctx(), request)
	return err
}

// unstage does it as kubelet does: again, while the answer is that it may be tried again.
func (v *volume) unstage() {
	v.r.t.Helper()
	check.Retried(v.r.t, "unstage", func() error {
		_, err := v.r.d.Runtime().RuntimeUnstageVolume(v.r.ctx(), &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: v.target})
		return err
	})
}

func (v *volume) stats() (*runtimev1.RuntimeGetVolumeStatsResponse, error) {
	return v.r.d.Runtime().RuntimeGetVolumeStats(v.r.ctx(), &runtimev1.RuntimeGetVolumeStatsRequest{VolumeTargetPath: v.target})
}

func (v *volume) expand(size int64) (int64, error) {
	reply, err := v.r.d.Runtime().RuntimeExpandVolume(v.r.ctx(), &runtimev1.RuntimeExpandVolumeRequest{
		VolumeTargetPath: v.target, CapacityRange: &runtimev1.CapacityRange{RequiredBytes: size},
	})
	return reply.GetCapacityBytes(), err
}

// onHost mounts the device here for a moment, while nothing else has it.
func (v *volume) onHost(do func(dir string)) {
	v.r.t.Helper()
	dir := v.r.t.TempDir()
	v.whenFree(func() error { return unix.Mount(v.disk, dir, v.fs, 0, "") })
	defer func() { check.Must(v.r.t, unix.Unmount(dir, 0)) }()
	do(dir)
}

// whenFree does what needs the device for itself. The kernel takes a mount away
// a moment after the last process that saw it.
func (v *volume) whenFree(do func() error) {
	v.r.t.Helper()
	check.Eventually(v.r.t, v.disk+" is free", func() bool {
		err := do()
		check.Require(v.r.t, err == nil || errors.Is(err, unix.EBUSY), "%s: %v", v.disk, err)
		return err == nil
	})
}

// check looks at the filesystem with its own checker.
func (v *volume) check() {
	v.r.t.Helper()
	v.whenFree(func() error { return rig.Exclusive(v.disk) })
	rig.Fsck(v.r.t, v.fs, v.disk)
}
