package csifront

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// TestDriverThatRefusesReadOnlyDevices, as vSphere's and several others do.
func TestDriverThatRefusesReadOnlyDevices(t *testing.T) {
	r := newRig(t, deferAll)
	r.driver.noRO = true
	r.stage()
	publish := r.publishReq("p1")
	publish.Readonly = true
	r.ok(r.kubelet.NodePublishVolume(t.Context(), publish))
	r.said("stage-block private", "publish-block private", "publish-block private")
	if flags := r.broker.asked.MountFlags; len(flags) != 1 || flags[0] != "ro" {
		t.Errorf("the sandbox is to mount it with %q", flags)
	}
	r.ok(nil, r.unpublish("p1"))
	r.driver.fail("publish-block", status.Error(codes.Internal, "no such volume"))
	_, err := r.kubelet.NodePublishVolume(t.Context(), publish)
	r.refused(err, codes.Internal, "no such volume")
	r.unstage()
	r.clean()
}

// TestGrowthOfADeviceWithoutASize: what is not known is not on record as a growth to nothing,
// and kubelet, which would take OK for done, asks again.
func TestGrowthOfADeviceWithoutASize(t *testing.T) {
	for name, abilities := range map[string]deferral.Abilities{"grows at mount": {GrowsAtMount: true}, "does not": {}} {
		for _, sandbox := range []string{"", "s1"} {
			t.Run(name+" "+sandbox, func(t *testing.T) {
				r := newRig(t, deferAll)
				r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_EXPAND_VOLUME)
				r.broker.abilities = abilities
				r.stage()
				r.ok(nil, r.publish("p1"))
				r.broker.bound[r.target("p1")] = sandbox
				r.broker.volumes[r.target("p1")].GrowTo = 2 << 30 // asked for before
				r.broker.size = 0
				_, err := r.kubelet.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
					VolumeId: "vol-1", VolumePath: r.target("p1"), CapacityRange: &csi.CapacityRange{RequiredBytes: 3 << 30},
				})
				r.refused(err, codes.FailedPrecondition, r.target("p1"), "/dev/fake", "cannot be read")
				if to := r.broker.volumes[r.target("p1")].GrowTo; to != 2<<30 {
					t.Errorf("the growth on record is to %d", to)
				}
			})
		}
	}
}

// TestGrowthGoesByTheDevicesSize: the device has grown, and the driver fails at what is
// around it, as Cinder's does where it looks for a filesystem.
func TestGrowthGoesByTheDevicesSize(t *testing.T) {
	r := newRig(t, deferAll)
	r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_EXPAND_VOLUME)
	r.stage()
	r.ok(nil, r.publish("p1"))
	r.broker.bound[r.target("p1")] = "s1"
	ask := &csi.NodeExpandVolumeRequest{
		VolumeId: "vol-1", VolumePath: r.target("p1"), VolumeCapability: mountCap(rwo, "ext4"),
		CapacityRange: &csi.CapacityRange{RequiredBytes: 2 << 30},
	}
	for _, code := range []codes.Code{codes.Internal, codes.Unavailable} {
		r.driver.fail("expand-block", status.Error(code, "devtmpfs has no filesystem"))
		r.broker.size = 1 << 30
		_, err := r.kubelet.NodeExpandVolume(t.Context(), ask)
		want := code
		if want == codes.Internal {
			want = codes.FailedPrecondition // which keeps no pod from starting
		}
		r.refused(err, want, "devtmpfs has no filesystem")
		r.broker.size = 2 << 30
		reply, err := r.kubelet.NodeExpandVolume(t.Context(), ask)
		if err != nil || reply.GetCapacityBytes() != 2<<30 {
			t.Errorf("%v: %v, %v", code, reply, err)
		}
	}
	ask.CapacityRange = nil
	_, err := r.kubelet.NodeExpandVolume(t.Context(), ask)
	r.refused(err, codes.Unavailable)
}
