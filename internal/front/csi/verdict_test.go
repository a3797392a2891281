package csi

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

func TestVolumesThatAreNotDeferredPass(t *testing.T) {
	r := newRig(t, &policy.Policy{})
	stage := r.stageReq()
	stage.Secrets = map[string]string{"k": "v"}
	r.ok(nil, r.tryStage(stage))
	asked := r.driver.last("stage-mount")
	check.That(t, proto.Equal(asked, stage), "the driver was asked %v", asked)
	r.ok(nil, r.publish("p1"))
	asked = r.driver.last("publish-mount")
	check.That(t, proto.Equal(asked, r.publishReq("p1")), "the driver was asked %v", asked)
	r.ok(nil, r.unpublish("p1"))
	r.unstage()
	r.said("stage-mount kubelet", "publish-mount kubelet", "unpublish kubelet", "unstage kubelet")
	r.clean()
}

func TestVerdictChangesWhenNoPodHasTheVolume(t *testing.T) {
	r := newRig(t, deferAsked)
	r.begin("p1")
	r.front.SetPolicy(deferThenHost)
	r.ok(nil, r.publish("p1")) // a repeated publish stays as it is
	r.ok(nil, r.publish("p2")) // and the second pod shares what is there
	r.said("stage-mount kubelet", "publish-mount kubelet", "publish-mount kubelet", "publish-mount kubelet")
	r.ok(nil, r.unpublish("p1"))
	r.ok(nil, r.unpublish("p2"))
	r.driver.said()
	r.restart()
	r.front.SetPolicy(deferThenHost)
	r.ok(nil, r.publish("p3"))
	r.said("unstage kubelet", "stage-block private", "publish-block private")
	r.front.SetPolicy(&policy.Policy{})
	r.ok(nil, r.publish("p3"))
	r.ok(nil, r.unpublish("p3"))
	r.driver.said()
	r.ok(nil, r.publish("p4"))
	r.said("unstage private", "stage-mount kubelet", "publish-mount kubelet")
	r.end("p4")
}

func TestRestageWithoutItsSecrets(t *testing.T) {
	r := newRig(t, deferAsked)
	stage := r.stageReq()
	stage.Secrets = map[string]string{"k": "v"}
	r.ok(nil, r.tryStage(stage))
	r.driver.said()
	r.front.SetPolicy(deferThenHost)
	r.ok(nil, r.publish("p1"))
	asked, _ := r.driver.last("stage-block").(*csi.NodeStageVolumeRequest)
	check.That(t, asked.GetSecrets()["k"] == "v", "the secrets were not remembered")
	r.ok(nil, r.unpublish("p1"))
	r.cfg.Policy = &policy.Policy{}
	r.restart()
	r.driver.said()
	r.refused(r.publish("p2"), codes.FailedPrecondition, "secrets", "memory only", "delete every pod")
	r.said()
	r.stage() // kubelet stages again, and all is well
	r.ok(nil, r.publish("p2"))
}

func TestRequestOfTheOrchestratorItself(t *testing.T) {
	r := newRig(t, deferAsked)
	r.stage()
	publish := r.publishReq("p1")
	csidefer.SetGroup(publish.GetVolumeCapability(), "1000", "Always")
	r.refused(r.tryPublish(publish), codes.InvalidArgument, "without defer_fs_ops")
	csidefer.SetRequested(publish)
	r.driver.said()
	r.ok(nil, r.tryPublish(publish))
	r.said("unstage kubelet", "stage-block private", "publish-block private")
	in := r.broker.asked
	check.That(t, in.Group == "1000" && in.GroupPolicy == volume.GroupAlways && in.Origin.Rule == policy.RuleRequested, "instruction: %+v", in)
	r.refused(r.publish("p2"), codes.FailedPrecondition, r.target("p1"))
	r.ok(nil, r.unpublish("p1"))
	publish = r.publishReq("p1")
	csidefer.SetGroup(publish.GetVolumeCapability(), "", "Always")
	csidefer.SetRequested(publish)
	r.refused(r.tryPublish(publish), codes.InvalidArgument, "policy")
}

// TestRepeatedPublishHasWhatIsOnRecord: kubelet publishes again after its restart. The
// broker would refuse another group or policy, or another filesystem, as another volume.
func TestRepeatedPublishHasWhatIsOnRecord(t *testing.T) {
	r := newRig(t, deferAll)
	r.cfg.Pods = fakePods{"p1": {UID: "p1", FSGroup: "2000", FSGroupPolicy: volume.GroupOnMismatch}}
	r.restart()
	r.stage()
	publish := r.publishReq("p1")
	publish.VolumeCapability.GetMount().VolumeMountGroup, publish.VolumeCapability.GetMount().FsType = "2000", ""
	r.ok(nil, r.tryPublish(publish))
	first := r.broker.asked
	r.cfg.DefaultFSType = "xfs" // the file was changed meanwhile
	r.restart()
	r.ok(nil, r.tryPublish(publish))
	again := r.broker.asked
	check.That(t, first.GroupPolicy == volume.GroupOnMismatch && again.Group == first.Group && again.GroupPolicy == first.GroupPolicy,
		"the group: %q %q, then %q %q", first.Group, first.GroupPolicy, again.Group, again.GroupPolicy)
	check.That(t, again.FSType == "ext4", "the filesystem is %s now", again.FSType)
}

func TestCapabilitiesThatKubeletIsTold(t *testing.T) {
	r := newRig(t, deferAll)
	reply, err := r.kubelet.NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
	r.ok(nil, err)
	for kind, want := range map[csi.NodeServiceCapability_RPC_Type]bool{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME: true,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS:     true,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME:        true,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH:    true,
		csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH:   false, // the driver's alone
		kubelet.VolumeCondition:                            false,
	} {
		check.That(t, offers(reply, kind) == want, "%s: want %v: %v", kind, want, reply)
	}
	r.refused(check.Err(r.kubelet.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "x", VolumePath: "/x"})), codes.Unimplemented, driverName)
	// Without the front kubelet would take the growth for done, and ask nobody.
	grown, err := r.kubelet.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
		VolumeId: "x", VolumePath: "/x", CapacityRange: &csi.CapacityRange{RequiredBytes: 5 << 30},
	})
	check.That(t, err == nil && grown.GetCapacityBytes() == 5<<30, "growth on a driver that grows nothing on nodes: %v, %v", grown, err)
	r.said()
	r.driver.setCaps(csi.NodeServiceCapability_RPC_GET_VOLUME_STATS, csi.NodeServiceCapability_RPC_EXPAND_VOLUME)
	r.ok(r.kubelet.NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{}))
	r.ok(r.kubelet.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "x", VolumePath: "/x"}))
	r.ok(r.kubelet.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: "x", VolumePath: "/x"}))
}

func TestStagedBeforeTheFrontCame(t *testing.T) {
	r := newRig(t, deferAll)
	r.refused(r.publish("p1"), codes.FailedPrecondition, "before crust-proxy", "delete every pod")
	r.said()
	r.clean()
}

// TestFullRunDirectory: what cannot be written keeps no volume that is not deferred
// from its pod, and no pod from ending; and yet no other pod gets it deferred.
func TestFullRunDirectory(t *testing.T) {
	r := newRig(t, &policy.Policy{})
	r.begin("p1")
	full := filepath.Join(r.cfg.StateDir, staging.RecordDir, staging.FileName(staging.VolumeID{Driver: driverName, ID: "vol-1"})+".new", "x")
	r.ok(nil, os.MkdirAll(full, 0o700)) // a record cannot be written beside the old one
	r.ok(nil, r.unpublish("p1"))
	r.ok(nil, r.publish("p2"))
	r.front.SetPolicy(&policy.Policy{Rules: []policy.Rule{{Name: "kata", RuntimeHandlers: []string{"kata"}, Defer: true}}})
	r.front.cfg.Pods = fakePods{"p3": {UID: "p3", RuntimeHandler: "kata"}}
	r.refused(r.publish("p3"), codes.FailedPrecondition, r.target("p2"), "wait until the other pod is gone")
	r.ok(nil, r.unpublish("p2"))
	record := strings.TrimSuffix(filepath.Dir(full), ".new")
	r.ok(nil, errors.Join(os.Remove(record), os.MkdirAll(record+"/x", 0o700))) // nor can the old one be removed
	r.unstage()
	r.ok(nil, errors.Join(os.RemoveAll(filepath.Dir(full)), os.RemoveAll(record)))
	r.clean()
}

// TestRawDeviceBesideADeferredVolume: block access does not get past the one owner.
func TestRawDeviceBesideADeferredVolume(t *testing.T) {
	r := newRig(t, deferAll)
	raw := r.publishRaw
	check.Must(t, os.MkdirAll(filepath.Dir(r.target("raw")), 0o750))
	r.begin("p1")
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
	r.end("p1")

	rox := csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	r.ok(nil, r.publishRaw(rox))
	r.stage()
	r.refused(r.publish("p1"), codes.FailedPrecondition, "raw device")
	reader := r.publishReq("p1")
	reader.Readonly = true
	r.ok(nil, r.tryPublish(reader))
}
