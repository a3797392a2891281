package csi

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func nativeRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t, deferAll)
	r.driver.setCaps(nativeCaps()...)
	r.driver.answer = &csidefer.Mount{Device: "/dev/fake", FSType: "xfs", Flags: []string{"noatime"}}
	return r
}

// toldOfDeferral reports whether the last unpublish told the driver that the volume was deferred.
func (r *rig) toldOfDeferral() bool {
	asked, _ := r.driver.last("unpublish").(*csi.NodeUnpublishVolumeRequest)
	return csidefer.Requested(asked)
}

func nativeCaps() []csi.NodeServiceCapability_RPC_Type {
	return []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_Type(csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS),
	}
}

func TestNativeDriverAnswersWhatToMount(t *testing.T) {
	r := nativeRig(t)
	r.stage()
	publish := r.publishReq("p1")
	publish.Readonly = true
	reply, err := r.kubelet.NodePublishVolume(t.Context(), publish)
	r.ok(nil, err)
	check.Equal(t, proto.Size(reply), 0, "bytes that kubelet was told")
	r.said("stage-mount kubelet", "publish-deferred kubelet")
	in := r.broker.asked
	check.That(t, in.Backing == "/dev/fake" && in.FSType == "xfs" && len(in.MountFlags) == 2 && in.MountFlags[1] == "ro" &&
		in.Origin.Way == volume.WayNative && in.Format == volume.FormatDriver, "instruction: %+v", in)
	r.ok(nil, r.unpublish("p1"))
	check.That(t, r.toldOfDeferral(), "the driver was not told that the volume was deferred")
	r.unstage()
	r.said("unpublish kubelet", "unstage kubelet")
	r.clean()
}

// TestNativeDriverThatDropsReadOnly is a driver that answers without the options of the
// volume. Who asked for ro must not get a volume that is written to.
func TestNativeDriverThatDropsReadOnly(t *testing.T) {
	r := nativeRig(t)
	r.stage()
	publish := r.publishReq("p1")
	publish.VolumeCapability = mountCap(rwo, "ext4", "nodev,ro")
	r.ok(nil, r.tryPublish(publish))
	flags := r.broker.asked.MountFlags
	check.That(t, slices.Equal(flags, []string{"noatime", "ro"}), "the sandbox mounts with %q", flags)
}

func TestNativeDriverThatDoesNeither(t *testing.T) {
	r := nativeRig(t)
	r.stage()
	r.driver.answer = nil
	r.driver.said()
	r.refused(r.publish("p1"), codes.Unimplemented, "neither answered", "Runtime API", driverName)
	r.said("publish-deferred kubelet", "unpublish kubelet")
	r.driver.answer = &csidefer.Mount{Device: "/dev/fake"}
	r.refused(r.publish("p1"), codes.InvalidArgument, "fs_type")
	r.unstage()
	r.clean()
}

func TestNativeDriverThatCallsTheRuntimeAPI(t *testing.T) {
	r := nativeRig(t)
	r.stage()
	r.driver.answer = nil
	_, err := r.broker.Defer(t.Context(), volume.Instruction{
		Type: volume.Block, Target: r.target("p1"), Backing: "/dev/fake", FSType: "ext4",
	})
	r.ok(nil, err)
	r.driver.said()
	r.ok(nil, r.publish("p1"))
	r.ok(nil, r.publish("p1")) // kubelet was restarted: a driver that is not asked to defer mounts
	r.said("publish-deferred kubelet", "publish-deferred kubelet")
	r.ok(nil, r.unpublish("p1"))
	check.That(t, r.toldOfDeferral(), "the driver was not told that the volume was deferred")
	r.unstage()
	r.clean()
}

// TestNativeDriverThatFailsAfterItCalledTheRuntimeAPI: kubelet does not unpublish after a final code.
func TestNativeDriverThatFailsAfterItCalledTheRuntimeAPI(t *testing.T) {
	r := nativeRig(t)
	r.stage()
	r.driver.published = func() error {
		r.ok(r.broker.Defer(t.Context(), volume.Instruction{Type: volume.Block, Target: r.target("p1"), Backing: "/dev/fake", FSType: "ext4"}))
		return status.Error(codes.Internal, "a later step failed")
	}
	r.refused(r.publish("p1"), codes.Internal, "a later step failed")
	r.unstage()
	r.clean()
}

// TestNativeDriverThatStagesForAnotherHandler: the Runtime API has no field for the handler, and the pod's sandbox would
// not find the volume. Nothing is left, not even if the driver does not undo its part at once.
func TestNativeDriverThatStagesForAnotherHandler(t *testing.T) {
	r := nativeRig(t)
	r.front.SetPolicy(&policy.Policy{Rules: []policy.Rule{{Name: "all", Defer: true, Handler: "crust"}}})
	r.stage()
	r.driver.published = func() error {
		return check.Err(r.broker.Defer(t.Context(), volume.Instruction{Type: volume.Block, Target: r.target("p1"), Backing: "/dev/fake", FSType: "ext4"}))
	}
	r.driver.fail("unpublish", status.Error(codes.Unavailable, "not now"))
	r.refused(r.publish("p1"), codes.Aborted, "not now", "crust")
	r.driver.fail("unpublish", nil)
	r.refused(r.publish("p1"), codes.Unimplemented, `"kata"`, `"crust"`, "handlers.default")
	r.unstage()
	r.clean()
}

// TestRepeatedUnpublishOfANativeDriver: the broker has released the volume when the driver
// fails, and kubelet repeats the call.
func TestRepeatedUnpublishOfANativeDriver(t *testing.T) {
	for name, restart := range map[string]bool{"in one life": false, "with a restart": true} {
		t.Run(name, func(t *testing.T) {
			r := nativeRig(t)
			r.ok(nil, os.MkdirAll(filepath.Dir(r.target("p1")), 0o750)) // as kubelet does
			r.begin("p1")
			r.driver.fail("unpublish", status.Error(codes.Unavailable, "the driver has gone"))
			r.refused(r.unpublish("p1"), codes.Unavailable)
			if restart {
				r.restart()
			}
			r.driver.fail("unpublish", nil)
			r.ok(nil, r.unpublish("p1"))
			check.That(t, r.toldOfDeferral(), "the driver was not told that the volume was deferred")
			r.unstage()
			r.clean()
		})
	}
}

// TestLostRecordOfADevice: the broker's record is damaged, so it does not say how the
// volume was published. The private path does.
func TestLostRecordOfADevice(t *testing.T) {
	r := growing(t)
	r.broker.volumes[r.target("p1")] = &volume.Volume{Key: volume.KeyOf(r.target("p1")), Target: r.target("p1")}
	r.refused(r.expand("p1"), codes.FailedPrecondition, r.target("p1"), "record")
	r.said()
	r.ok(nil, r.publish("p1"))
	r.said("publish-block private")
	in := r.broker.asked
	check.That(t, in.Origin.Way == volume.WayBlock && in.Origin.VolumeID == "vol-1", "instruction: %+v", in.Origin)
	r.end("p1")
}

// TestLostRecordUnderASandbox: the broker cannot tell which volume a sandbox has, so another
// pod does not get it on the host, and the driver does not get it back.
func TestLostRecordUnderASandbox(t *testing.T) {
	r := newRig(t, deferThenHost)
	r.begin("p1")
	r.broker.volumes[r.target("p1")] = &volume.Volume{Key: volume.KeyOf(r.target("p1")), Target: "(unknown)", ResolvedTarget: r.target("p1")}
	r.driver.said()
	r.front.SetPolicy(&policy.Policy{})
	words := []string{"vol-1", r.target("p1"), "delete its pod"}
	r.refused(r.publish("p2"), codes.Aborted, words...)
	r.refused(r.tryStage(r.stageReq()), codes.Aborted, words...)
	r.refused(r.tryUnstage(), codes.Aborted, words...)
	r.refused(r.publishRaw(rwo), codes.Aborted, words...)
	r.said()
	r.ok(nil, r.unpublish("p1"))
	r.ok(nil, r.publish("p2"))
	r.said("unpublish private", "unstage private", "stage-mount kubelet", "publish-mount kubelet")
}

// TestAllRecordsLostUnderASandbox: nothing tells that the volume is staged as a device, and
// the policy does not defer it any more. The driver must not mount the device on the host.
func TestAllRecordsLostUnderASandbox(t *testing.T) {
	r := newRig(t, deferThenHost)
	r.begin("p1")
	r.broker.volumes[r.target("p1")] = &volume.Volume{Key: volume.KeyOf(r.target("p1")), Target: "(unknown)", ResolvedTarget: r.target("p1")}
	r.ok(nil, os.RemoveAll(r.cfg.StateDir))
	r.restart()
	r.driver.said()
	r.ok(nil, r.tryStage(r.stageReq())) // as it is
	r.ok(nil, os.RemoveAll(r.cfg.StateDir))
	r.cfg.Policy = &policy.Policy{}
	r.restart()
	r.driver.said()
	r.refused(r.tryStage(r.stageReq()), codes.Aborted, "vol-1", r.target("p1"), "delete its pod")
	r.said()
	r.ok(nil, r.unpublish("p1"))
	r.stage()
	r.said("unpublish private", "unstage private", "stage-mount kubelet")
	r.unstage()
	r.clean()
}

// TestLostStageIsNotUndoneUnderAPod: kubelet stages the volume again after its restart, and
// the driver's answers are uncertain first and final then.
func TestLostStageIsNotUndoneUnderAPod(t *testing.T) {
	r := newRig(t, deferAll)
	r.begin("p1")
	r.ok(nil, os.RemoveAll(r.cfg.StateDir))
	r.restart()
	r.driver.said()
	for _, code := range []codes.Code{codes.Internal, codes.Unavailable, codes.Internal} {
		r.driver.fail("stage-block", status.Error(code, "not now"))
		want := codes.Aborted
		if code == codes.Unavailable {
			want = code
		}
		r.refused(r.tryStage(r.stageReq()), want, "not now")
	}
	r.said("stage-block private", "stage-block private", "stage-block private")
	r.driver.fail("stage-block", nil)
	r.stage()
	r.ok(nil, r.unpublish("p1"))
	r.driver.said()
	r.unstage()
	r.said("unstage private")
	r.clean()
}

// TestLostStageIsNotPublishedOnTheHost: nothing is mounted at kubelet's staging path. A driver
// that shows a pod what is there would have it write to the node's disk.
func TestLostStageIsNotPublishedOnTheHost(t *testing.T) {
	for name, toNative := range map[string]bool{"by the policy": false, "by the driver": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, deferAll)
			r.stage()
			r.ok(nil, os.RemoveAll(r.cfg.StateDir))
			r.restart()
			if toNative {
				r.driver.setCaps(nativeCaps()...)
			} else {
				r.front.SetPolicy(&policy.Policy{})
			}
			r.driver.said()
			r.refused(r.publish("p1"), codes.FailedPrecondition, r.target("p1"), "staged as a device", "delete every pod")
			r.said()
			r.unstage()
			r.stage()
			r.driver.said()
			r.driver.answer = &csidefer.Mount{Device: "/dev/fake", FSType: "ext4"}
			r.ok(nil, r.publish("p1"))
			r.said(map[bool]string{false: "publish-mount kubelet", true: "publish-deferred kubelet"}[toNative])
		})
	}
}

func TestDowngradedDriver(t *testing.T) {
	r := nativeRig(t)
	r.begin("p1")
	r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_EXPAND_VOLUME)
	r.driver.said()
	r.refused(r.expand("p1"), codes.FailedPrecondition, "downgraded")
	r.broker.bound[r.target("p1")] = "s1"
	r.refused(r.expand("p1"), codes.Aborted, "downgraded") // kubelet asks again when it is upgraded
	delete(r.broker.bound, r.target("p1"))
	r.refused(r.publish("p1"), codes.Aborted, "downgraded") // it would mount the volume on the host
	r.said()
	r.ok(nil, r.unpublish("p1"))
	check.That(t, !r.toldOfDeferral(), "a driver that cannot defer was told of it")
	r.unstage()
	r.said("unpublish kubelet", "unstage kubelet")
	r.clean()
}

func TestUpgradedDriver(t *testing.T) {
	r := newRig(t, deferAll)
	r.begin("p1")
	r.driver.setCaps(nativeCaps()...)
	r.driver.answer = &csidefer.Mount{Device: "/dev/fake", FSType: "ext4"}
	r.driver.said()
	r.ok(nil, r.publish("p1")) // what a pod has stays as it is
	r.said("publish-block private")
	r.ok(nil, r.unpublish("p1"))
	r.driver.said()
	r.ok(nil, r.publish("p2"))
	r.said("unstage private", "stage-mount kubelet", "publish-deferred kubelet")
	r.end("p2")
}

// TestUpgradedDriverUnderAReader: a second reader comes while the first one has the volume
// in the former way, in which it is staged.
func TestUpgradedDriverUnderAReader(t *testing.T) {
	publish := func(r *rig, pod string) error {
		req := r.publishReq(pod)
		req.Readonly = true
		return check.Err(r.kubelet.NodePublishVolume(t.Context(), req))
	}
	r := newRig(t, deferAll)
	r.driver.answer = &csidefer.Mount{Device: "/dev/fake", FSType: "ext4"}
	r.stage()
	r.ok(nil, publish(r, "p1"))
	r.driver.setCaps(nativeCaps()...)
	r.driver.said()
	r.ok(nil, publish(r, "p2"))
	r.said("publish-block private")

	r = nativeRig(t)
	r.stage()
	r.ok(nil, publish(r, "p1"))
	r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME)
	r.driver.said()
	r.refused(publish(r, "p2"), codes.FailedPrecondition, "downgraded")
	r.said()
}

func TestNativeGrowth(t *testing.T) {
	r := nativeRig(t)
	r.begin("p1")
	r.broker.bound[r.target("p1")] = "s1"
	r.broker.size = 2 << 30
	r.ok(nil, r.grow())
	asked, _ := r.driver.last("expand-mount").(*csi.NodeExpandVolumeRequest)
	check.That(t, csidefer.Requested(asked), "the driver was not told to grow the device only")
}
