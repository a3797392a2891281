//go:build system

package containerd

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
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
