package csi

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestTargetThatCannotBeLookedUp is a node without free descriptors: whether the volume at
// a target is deferred is not known for a moment. That is no proof that it is not.
func TestTargetThatCannotBeLookedUp(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.ok(nil, r.publish("pod1"))
	r.driver.said()
	r.broker.findErr = volume.Errorf(volume.Internal, "the kubelet root cannot be opened: %w", unix.EMFILE)
	ctx, at := t.Context(), r.target("pod1")
	_, stats := r.kubelet.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: "vol-1", VolumePath: at})
	_, expand := r.kubelet.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: "vol-1", VolumePath: at})
	_, health := r.kubelet.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: "vol-1", VolumePublishPath: at})
	for name, err := range map[string]error{
		"publish": r.publish("pod1"), "unpublish": r.unpublish("pod1"), "stats": stats, "expand": expand, "health": health,
	} {
		t.Run(name, func(t *testing.T) {
			if codeOf(err) != codes.Aborted {
				t.Errorf("got %v", err)
			}
		})
	}
	r.said() // a driver that is asked would act under a sandbox
	r.broker.findErr = nil
	r.ok(nil, r.publish("pod1"))
	r.ok(nil, r.unpublish("pod1"))
}

// TestPrivatePathThatCannotBeSeen is a node without free descriptors while a pod ends: a
// device that cannot be seen at its private path is still there.
func TestPrivatePathThatCannotBeSeen(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.ok(nil, r.publish("pod1"))
	r.driver.said()
	check.WithoutDescriptors(t, func() {
		r.refused(r.unpublish("pod1"), codes.Aborted, r.cfg.PrivateDir)
	})
	r.said()
	r.ok(nil, r.unpublish("pod1"))
	r.said("unpublish private")
	check.WithoutDescriptors(t, func() {
		_, err := r.tryUnstage()
		r.refused(err, codes.Aborted, r.cfg.PrivateDir)
	})
	r.said()
	r.unstage()
	r.said("unstage private")
	r.clean()
}
