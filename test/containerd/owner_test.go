//go:build system

package containerd

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// A second pod must not have the volume of another one that runs, whatever its
// target is; nor may the volume be taken from a pod that runs.
func TestADeviceInUseIsRefused(t *testing.T) {
	r := newTestNode(t)
	v := r.staged("pod-1", "ext4")
	pod := r.pod("pod-1")
	id := r.run(pod, "main", at(v.target))
	again := *v
	again.pod = "pod-2"
	if err := again.tryStage(); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a second pod: %v", err)
	}
	_, err := r.d.Runtime().RuntimeUnstageVolume(r.ctx(), &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: v.target})
	if status.Code(err) != codes.Aborted || !strings.Contains(err.Error(), pod.ID) {
		t.Errorf("unstage below a running pod: %v", err)
	}
	v.wantStats(id)
	r.remove(pod)
	v.unstage()
}

// What somebody has mounted on the node is not mounted for a pod as well: two
// owners would get one filesystem from the kernel without a word.
func TestADeviceThatTheNodeMountedIsRefused(t *testing.T) {
	r := newTestNode(t)
	for _, fs := range filesystems {
		v := r.staged("pod-"+fs, fs)
		dir := t.TempDir()
		check.Must(t, unix.Mount(v.disk, dir, fs, 0, ""))
		pod := r.pod(v.pod)
		_, err := pod.Run(r.ctx(), cri.Container{Name: "main", Mounts: []cri.Mount{at(v.target)}})
		if err == nil || !strings.Contains(err.Error(), "in use") {
			t.Errorf("%s: a container ended with: %v", fs, err)
		}
		check.Must(t, unix.Unmount(dir, 0))
		v.wantStats(r.run(pod, "again", at(v.target)))
		r.remove(pod)
		v.unstage()
	}
	r.wantClean()
}

// Pods start, end and start again while the daemon is away: all that they need is
// on the node. It learns of them when it is back.
func TestPodsNeedNoDaemon(t *testing.T) {
	r := layOut(t)
	r.d.Extra = "reconcileInterval: 1s"
	r.d.Start()
	v := r.staged("pod-1", "xfs")
	r.d.Kill()
	first := r.pod("pod-1")
	sum := r.write(r.run(first, "main", at(v.target)), "/data/blob")
	r.remove(first)
	second := r.attempt("pod-1", 1)
	id := r.run(second, "main", at(v.target))
	if got := r.exec(id, "sha256sum /data/blob"); !strings.HasPrefix(got, sum) {
		t.Errorf("it reads %q", got)
	}
	r.d.Start()
	v.wantStats(id)
	check.Eventually(t, "only the living sandbox is on record", func() bool { return slices.Equal(v.recorded(), []string{second.ID}) })
	r.d.Kill()
	r.remove(second)
	r.d.Start()
	v.unstage()
	v.check()
	r.wantClean()
}

// One pod has several volumes, and one of its containers has them all.
func TestSeveralVolumesInOnePod(t *testing.T) {
	r := newTestNode(t)
	var volumes []*volume
	var mounts []cri.Mount
	for _, fs := range filesystems {
		v := r.volume("pod-1", fs, diskSize)
		v.name = "pv-" + fs
		v.stage()
		volumes = append(volumes, v)
		mounts = append(mounts, cri.Mount{Host: v.target, Container: "/" + fs})
	}
	pod := r.pod("pod-1")
	all := r.run(pod, "all", mounts...)
	r.exec(all, "for fs in "+strings.Join(filesystems, " ")+"; do echo $fs > /$fs/name; done; sync")
	for i, v := range volumes {
		id := r.run(pod, "only-"+v.fs, at(v.target))
		if got := r.exec(id, "cat /data/name"); got != v.fs+"\n" {
			t.Errorf("%s holds %q", v.fs, got)
		}
		volumes[i].wantStats(id)
	}
	r.remove(pod)
	for _, v := range volumes {
		v.unstage()
		v.check()
	}
	r.wantClean()
}
