package csi

import (
	"os"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
)

// TestNoDriverIsAskedForAReadOnlyDevice: vSphere's and others refuse it, and Exoscale's makes
// the device read-only for ever. The access mode stays.
func TestNoDriverIsAskedForAReadOnlyDevice(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	publish := r.publishReq("p1")
	publish.Readonly, publish.VolumeCapability = true, mountCap(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, "ext4")
	r.ok(nil, r.tryPublish(publish))
	r.said("stage-block private", "publish-block private")
	asked, _ := r.driver.last("publish-block").(*csi.NodePublishVolumeRequest)
	mode := asked.GetVolumeCapability().GetAccessMode().GetMode()
	check.That(t, mode == csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, "the driver was asked with the access mode %v", mode)
	flags := r.broker.asked.MountFlags
	check.That(t, len(flags) == 1 && flags[0] == "ro", "the sandbox is to mount it with %q", flags)
	r.end("p1")
}

// TestDriverThatMakesADirectory cannot give this volume as a device. Its other volumes are deferred.
func TestDriverThatMakesADirectory(t *testing.T) {
	r := newRig(t, deferAll)
	r.driver.wrongly = func(path string) error { return os.Mkdir(path, 0o700) }
	r.stage()
	r.refused(r.publish("p1"), codes.Unimplemented, driverName, "no raw block volumes", "made a directory", "defer: false", `rule "all"`)
	refused := r.cfg.Refusals.Refused()
	check.That(t, len(refused) == 1 && refused[0].Party == refusal.PartyDriver, "refused: %+v", refused)
	r.said("stage-block private", "publish-block private", "unpublish private")
	other := r.stageReq()
	other.VolumeId, other.StagingTargetPath = "vol-2", other.GetStagingTargetPath()+"2"
	r.ok(nil, r.tryStage(other))
	r.ok(r.kubelet.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: "vol-2", StagingTargetPath: other.GetStagingTargetPath()}))
	r.said("stage-block private", "unstage private")
	r.front.SetPolicy(&policy.Policy{}) // as the error advises
	r.ok(nil, r.publish("p1"))
	r.said("unstage private", "stage-mount kubelet", "publish-mount kubelet")
	r.end("p1")
}

// TestDriverThatMakesALink, as HPE's does: it would lead out of kubelet's directory.
func TestDriverThatMakesALink(t *testing.T) {
	r := newRig(t, deferAll)
	r.driver.wrongly = func(path string) error { return os.Symlink("/dev/null", path) }
	r.stage()
	r.refused(r.publish("p1"), codes.Unimplemented, driverName, "no raw block volumes", "made a link", "defer: false")
	r.said("stage-block private", "publish-block private", "unpublish private")
	r.ok(r.kubelet.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: "vol-1", StagingTargetPath: r.staging()}))
}

// as is kubelet's connection to the driver by another name.
func (r *rig) as(name string) csi.NodeClient {
	r.t.Helper()
	socket := r.dir + "/" + name + ".sock"
	rpctest.Serve(r.t, socket, grpc.NewServer(r.front.Driver(name, nil, rpctest.Dial(r.t, r.dir+"/driver.sock")).ServerOptions()...))
	return csi.NewNodeClient(rpctest.Dial(r.t, socket))
}

// TestDriversKnownByName: Vultr's and Trident would format the volume, and Proxmox' would take the
// node's disk offline where nothing is mounted.
func TestDriversKnownByName(t *testing.T) {
	r := newRig(t, deferAll)
	for _, name := range []string{"block.csi.vultr.com", "csi.trident.netapp.io"} {
		_, err := r.as(name).NodeStageVolume(t.Context(), r.stageReq())
		r.refused(err, codes.Unimplemented, name+" has no raw block volumes", "defer: false")
	}
	const proxmox = "csi.proxmox.sinextra.dev"
	r.cfg.PrivateDir = r.broker.root + "/plugins/other"
	r.restart()
	private := staging.NewPrivatePaths(r.cfg.KubeletRoot, r.cfg.PrivateDir).Staging(staging.VolumeID{Driver: proxmox, ID: "vol-1"}, r.staging())
	r.ok(nil, os.MkdirAll(private, 0o700))
	kubelet := r.as(proxmox)
	for range 2 { // it was staged outside of kubelet's directory, and then nowhere
		r.ok(kubelet.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: "vol-1", StagingTargetPath: r.staging()}))
	}
	check.Fails(t, check.Err(os.Stat(private))) // or the private directory is still there
	r.said()
}

// TestPrivateDirThatIsChanged: a driver finds a volume only where it has staged and published it.
func TestPrivateDirThatIsChanged(t *testing.T) {
	r := newRig(t, deferAll)
	r.begin("p1")
	device, staging := r.broker.asked.Backing, r.broker.asked.Origin.PrivateStaging
	r.driver.said()
	r.cfg.PrivateDir = r.broker.root + "/plugins/other"
	r.restart()
	r.begin("p1")
	r.end("p1")
	want := []string{"stage-block " + staging, "publish-block " + device, "unpublish " + device, "unstage " + staging}
	said := r.driver.said()
	check.That(t, slices.Equal(said, want), "the driver was asked for %q, want %q", said, want)
}

// TestGrowthOfADeviceWithoutASize: what is not known is not on record as a growth to nothing,
// and kubelet, which would take OK for done, asks again.
func TestGrowthOfADeviceWithoutASize(t *testing.T) {
	for _, atMount := range []bool{true, false} {
		r := newRig(t, deferAll)
		r.broker.abilities.GrowsAtMount = atMount
		r.begin("p1")
		r.broker.volumes[r.target("p1")].GrowTo = 2 << 30 // asked for before
		for sandbox, code := range map[string]codes.Code{"": codes.FailedPrecondition, "s1": codes.Aborted} {
			r.broker.bound[r.target("p1")], r.broker.size = sandbox, 0
			r.refused(r.expand("p1"), code, r.target("p1"), "/dev/fake", "cannot be read")
			check.Equal(t, r.broker.volumes[r.target("p1")].GrowTo, 2<<30, "the growth on record")
		}
	}
}

// TestGrowthOfAnEncryptedVolume: its capacity includes the header, which the device lacks.
func TestGrowthOfAnEncryptedVolume(t *testing.T) {
	r := growing(t)
	r.broker.abilities.GrowsAtMount, r.header = true, 16<<20
	for sandbox, not := range map[string]codes.Code{"": codes.FailedPrecondition, "s1": codes.Aborted} {
		r.broker.bound[r.target("p1")] = sandbox
		for size, want := range map[int64]codes.Code{2 << 30: codes.OK, 2<<30 - 16<<20: codes.OK, 2<<30 - 16<<20 - 1: not} {
			r.broker.size = size
			r.refused(r.grow(), want)
		}
	}
}

// TestGrowthGoesByTheDevicesSize: the device has grown, and the driver fails at what is
// around it, as Cinder's does where it looks for a filesystem.
func TestGrowthGoesByTheDevicesSize(t *testing.T) {
	r := growing(t)
	for _, c := range []struct {
		sandbox   string
		code, not codes.Code // of the driver, and where the device has not grown
		says      string
	}{
		{"", codes.Internal, codes.FailedPrecondition, "devtmpfs has no filesystem"}, // which keeps no pod from starting
		{"s1", codes.Internal, codes.Internal, "devtmpfs has no filesystem"},         // which kubelet repeats
		{"s1", codes.OK, codes.Aborted, "has not grown"},
		{"s1", codes.Unavailable, codes.Unavailable, "devtmpfs has no filesystem"},
		{"s1", codes.InvalidArgument, codes.Aborted, "devtmpfs has no filesystem"}, // kubelet takes these three for "never"
		{"s1", codes.OutOfRange, codes.Aborted, "devtmpfs has no filesystem"},
		{"s1", codes.NotFound, codes.Aborted, "devtmpfs has no filesystem"},
	} {
		r.broker.bound[r.target("p1")], r.broker.abilities.GrowsAtMount = c.sandbox, c.sandbox == ""
		r.driver.fail("expand-block", status.Error(c.code, "devtmpfs has no filesystem"))
		r.broker.size = 1 << 30
		r.refused(r.grow(), c.not, c.says)
		r.broker.size = 2 << 30
		r.ok(nil, r.grow())
	}
	for _, kind := range []volume.Kind{volume.OutOfRange, volume.Invalid} {
		r.sandboxes.err = volume.Errorf(kind, "volume v: the sandbox is in the wrong state")
		r.refused(r.grow(), codes.Aborted, "wrong state")
	}
	r.driver.fail("expand-block", status.Error(codes.Unavailable, "devtmpfs has no filesystem"))
	r.refused(r.expand("p1"), codes.Unavailable)
}
