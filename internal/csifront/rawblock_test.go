package csifront

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

// TestRawDeviceBesideADeferredVolume: block access does not get past the one owner.
func TestRawDeviceBesideADeferredVolume(t *testing.T) {
	r := newRig(t, deferAll)
	raw := func(mode csi.VolumeCapability_AccessMode_Mode) error {
		_, err := r.kubelet.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{
			VolumeId: "vol-1", TargetPath: r.target("raw"), StagingTargetPath: r.staging(), VolumeCapability: &csi.VolumeCapability{
				AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
				AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
			},
		})
		return err
	}
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
