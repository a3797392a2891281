//go:build system

package front

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/front/passthrough"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

// ofOldCSI has the reference driver be one of CSI 1.12: no health calls, and a condition in
// its stats.
func ofOldCSI(t *testing.T, condition []byte) []string {
	hide, _ := rig.Hide(csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH, csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH)
	return startBefore(t, map[string]passthrough.Local{
		csi.Node_NodeGetVolumeHealth_FullMethodName: func(context.Context, []byte, passthrough.Forward) ([]byte, error) {
			t.Error("a driver without GET_VOLUME_HEALTH was asked for health")
			return nil, status.Error(codes.Unimplemented, "")
		},
		csi.Node_NodeGetVolumeStats_FullMethodName: func(ctx context.Context, request []byte, forward passthrough.Forward) ([]byte, error) {
			reply, err := forward(ctx, request)
			return append(reply, condition...), err
		},
		csi.Node_NodeGetCapabilities_FullMethodName: hide,
	})
}

func (n *node) supports(kind csi.NodeServiceCapability_RPC_Type) bool {
	n.t.Helper()
	reply, err := n.driver.Node.NodeGetCapabilities(n.t.Context(), &csi.NodeGetCapabilitiesRequest{})
	check.Must(n.t, err)
	return slices.ContainsFunc(reply.GetCapabilities(), func(one *csi.NodeServiceCapability) bool { return one.GetRpc().GetType() == kind })
}

// wantHealth asks as the kubelet of Kubernetes 1.37 does, which takes any error for a
// health that has not changed. It asks again: who has 2 s may take longer on a busy machine.
func (n *node) wantHealth(v *volume, pod string, want ...string) {
	n.t.Helper()
	check.Succeeds(n.t, fmt.Sprintf("health is %q", want), func() error {
		reply, err := n.driver.Node.NodeGetVolumeHealth(n.t.Context(), &csi.NodeGetVolumeHealthRequest{
			VolumeId: v.ID, VolumePublishPath: v.TargetOf(pod), StagingTargetPath: v.Staging,
		})
		var got []string
		for _, one := range reply.GetVolumeHealth().GetHealthStatuses() {
			got = append(got, one.GetStatus().String()+" "+one.GetReason())
		}
		if err == nil && (reply.GetVolumeHealth().GetVolumeId() != v.ID || !slices.Equal(got, want)) {
			err = fmt.Errorf("health: %v", reply)
		}
		return err
	})
}

// TestHealth: of a deferred volume kubelet hears what the sandbox knows, and what the driver knows
// if it has the call of CSI 1.13; and a kubelet that is too old for that call reads the former in the condition.
func TestHealth(t *testing.T) {
	for name, args := range map[string][]string{"with": nil, "native": {"--defer"}, "without": ofOldCSI(t, nil)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, deferAll, args...)
			if !n.supports(csi.NodeServiceCapability_RPC_GET_VOLUME_STATS) || !n.supports(csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH) ||
				n.supports(kubelet.VolumeCondition) {
				t.Error("kubelet is not told of the capabilities")
			}
			v := n.create("pv-1", "ext4", 400*mib)
			n.wantHealth(v, "pod-1")
			check.Must(t, n.stage(v))
			n.wantHealth(v, "pod-1")
			check.Must(t, n.publish(v, "pod-1"))
			n.wantHealth(v, "pod-1")
			s := n.boot("sandbox-1", v, "pod-1")
			n.wantStats(v, "pod-1", s)
			n.wantHealth(v, "pod-1")
			check.Must(t, s.Shim.Stop())
			n.wantHealth(v, "pod-1", "DEGRADED NoSandbox")
			n.end(s)
			check.Must(t, n.unpublish(v, "pod-1"))

			rig.RecordErrors(t, n.loops()[0])
			check.Must(t, n.publish(v, "pod-2"))
			s = n.boot("sandbox-2", v, "pod-2")
			check.Succeeds(t, "stats of the sandbox", func() error { _, err := n.stats(v, "pod-2"); return err })
			reply, err := n.stats(v, "pod-2")
			check.Must(t, err)
			old, err := kubelet.Condition(reply)
			check.That(t, err == nil && old.GetAbnormal() && len(reply.GetUsage()) != 0, "an old kubelet reads %v, %v; a new one %v", old, err, reply)
			n.wantHealth(v, "pod-2", "DEGRADED ErrorsOnRecord")
			want := []string{"DEGRADED ErrorsOnRecord"}
			if name != "without" {
				want = append(want, "INACCESSIBLE ImageMissing")
			}
			images, _ := filepath.Glob(n.driver.Data + "/*/*.img")
			check.Must(t, os.Rename(images[0], images[0]+"~"))
			n.wantHealth(v, "pod-2", want...)
			check.Must(t, n.driver.Process.Signal(unix.SIGSTOP))
			n.supports(csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH)
			n.wantHealth(v, "pod-2", "DEGRADED ErrorsOnRecord")
			check.Must(t, n.driver.Process.Signal(unix.SIGCONT))
			other := n.create("pv-2", "ext4", 400*mib)
			n.up(other, "pod-3") // its answer ends the minute without calls
			n.down(other, "pod-3")
			n.wantHealth(v, "pod-2", want...)
			check.Must(t, os.Rename(images[0]+"~", images[0]))
			n.end(s)
			n.down(v, "pod-2")
		})
	}
}
