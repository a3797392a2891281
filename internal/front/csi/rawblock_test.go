package csi

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestRawDeviceBesideADeferredVolume: block access does not get past the one owner.
func TestRawDeviceBesideADeferredVolume(t *testing.T) {
	r := newRig(t, deferAll)
	raw := r.publishRaw
	if err := os.MkdirAll(filepath.Dir(r.target("raw")), 0o750); err != nil {
		t.Fatal(err)
	}
	r.stage()
	r.ok(nil, r.publish("p1"))
	r.driver.said()
	r.refused(raw(rwo), codes.FailedPrecondition, "raw device", r.target("p1"))
	r.refused(raw(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY), codes.FailedPrecondition, "raw device")
	r.said() // the driver was not asked
	r.broker.volumes[r.target("p1")].ReadOnly = true
	r.ok(nil, raw(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY))
	r.refused(raw(rwo), codes.FailedPrecondition, "raw device")
}

func (r *rig) publishRaw(mode csi.VolumeCapability_AccessMode_Mode) error {
	r.t.Helper()
	_, err := r.kubelet.NodePublishVolume(r.t.Context(), &csi.NodePublishVolumeRequest{
		VolumeId: "vol-1", TargetPath: r.target("raw"), StagingTargetPath: r.rawStaging(), VolumeCapability: &csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		},
	})
	return err
}

func (r *rig) rawStaging() string {
	return r.broker.root + "/plugins/kubernetes.io/csi/volumeDevices/staging/pv2"
}

// TestDeferredVolumeBesideARawDevice: the raw device comes first. Its pod may open it at any
// time, so that the kernel shows nobody who has it.
func TestDeferredVolumeBesideARawDevice(t *testing.T) {
	r := newRig(t, deferAll)
	r.ok(nil, os.MkdirAll(filepath.Dir(r.target("raw")), 0o750))
	r.driver.fail("publish-block", status.Error(codes.Internal, "never"))
	r.refused(r.publishRaw(rwo), codes.Internal)
	r.clean() // the driver has refused it for good
	r.driver.fail("publish-block", nil)
	r.ok(nil, r.publishRaw(rwo))
	r.stage()
	r.restart()
	r.driver.said()
	r.refused(r.publish("p1"), codes.FailedPrecondition, "raw device", r.target("raw"), "wait until the other pod is gone")
	r.said() // the driver was not asked
	unstageRaw := &csi.NodeUnstageVolumeRequest{VolumeId: "vol-1", StagingTargetPath: r.rawStaging()}
	r.ok(nil, r.unpublish("raw"))
	r.ok(r.kubelet.NodeUnstageVolume(t.Context(), unstageRaw))
	r.driver.said()
	r.ok(nil, r.publish("p1"))
	r.said("publish-block private") // it is staged: the other staging path was another volume's
	r.ok(nil, r.unpublish("p1"))
	r.unstage()
	r.clean()

	rox := csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	r.ok(nil, r.publishRaw(rox))
	r.stage()
	r.refused(r.publish("p1"), codes.FailedPrecondition, "raw device")
	reader := r.publishReq("p1")
	reader.Readonly = true
	r.ok(r.kubelet.NodePublishVolume(t.Context(), reader))
}
