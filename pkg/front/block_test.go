package front

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
)

func TestUnmodifiedDriverIsAskedForADevice(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.said("stage-block private")
	r.ok(nil, r.publish("p1"))
	r.said("publish-block private")
	got := r.broker.asked
	if !strings.HasPrefix(got.Backing, r.cfg.PrivateDir+"/") || got.FSType != "ext4" || got.Format != deferral.FormatHost ||
		got.CSI.Rule != `rule "all"` || got.CSI.Way != deferral.WayBlock || got.CSI.VolumeID != "vol-1" || got.Driver != driverName {
		t.Errorf("instruction: %+v, %+v", got, got.CSI)
	}
	asked, _ := r.driver.last("publish-block").(*csi.NodePublishVolumeRequest)
	if asked.GetStagingTargetPath() != got.CSI.PrivateStaging || asked.GetVolumeCapability().GetAccessMode().GetMode() != rwo {
		t.Errorf("the driver was asked %v", asked)
	}
	r.ok(nil, r.unpublish("p1"))
	r.said("unpublish private")
	r.unstage()
	r.said("unstage private")
	r.clean()
}

func TestEveryCallCanBeRepeatedAndRestarted(t *testing.T) {
	r := newRig(t, deferAll)
	again := func(f func()) {
		t.Helper()
		f()
		f()
		r.restart()
		f()
		r.driver.said()
	}
	again(r.stage)
	again(func() { r.ok(nil, r.publish("p1")) })
	again(r.stage) // kubelet repeats stage and publish after its restart
	again(func() { r.ok(nil, r.publish("p1")) })
	again(func() { r.ok(nil, r.unpublish("p1")) })
	again(r.unstage)
	r.clean()
}

func TestSandboxKeepsTheDevice(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.ok(nil, r.publish("p1"))
	r.broker.bound[r.target("p1")] = "sandbox-7"
	r.driver.said()
	r.refused(r.unpublish("p1"), codes.Aborted, "sandbox-7")
	_, err := r.tryUnstage()
	r.refused(err, codes.Aborted, "still published", r.target("p1"))
	r.said()
	delete(r.broker.bound, r.target("p1"))
	r.ok(nil, r.unpublish("p1"))
	r.unstage()
	r.clean()
}

func TestLostRecordsAreNoObstacle(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.ok(nil, r.publish("p1"))
	// A reboot: /run is empty, the private paths are on disk.
	if err := os.RemoveAll(r.cfg.StateDir); err != nil {
		t.Fatal(err)
	}
	clear(r.broker.volumes)
	r.restart()
	r.driver.said()
	r.ok(nil, r.unpublish("p1"))
	r.said("unpublish private")
	r.unstage()
	r.said("unstage private", "unstage kubelet")
	r.clean()
}

func TestRecordsOfAnEarlierBootMeanNothing(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.front.records.boot = "earlier"
	r.stage()
	r.restart()
	if rec := r.front.records.get(volumeID{driverName, "vol-1"}); rec.Stage != nil {
		t.Errorf("the record was taken: %+v", rec)
	}
}

func TestFailedHandOverLeavesNothing(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.driver.said()
	r.broker.stageErr = deferral.Errorf(deferral.InUse, "volume v: its device is mounted on the host")
	r.refused(r.publish("p1"), codes.FailedPrecondition, "mounted on the host")
	r.said("publish-block private", "unpublish private")
	r.driver.fail("unpublish", status.Error(codes.Internal, "busy now"))
	r.refused(r.publish("p1"), codes.Aborted, "mounted on the host", "could not be undone yet", "busy now")
	r.driver.fail("unpublish", nil)
	r.ok(nil, r.unpublish("p1"))
	r.unstage()
	r.clean()
}

func TestFailedRepeatLeavesThePublishedVolume(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.ok(nil, r.publish("p1"))
	r.driver.said()
	r.driver.fail("publish-block", status.Error(codes.Internal, "not now"))
	r.refused(r.publish("p1"), codes.Internal, "not now")
	r.driver.fail("publish-block", nil)
	r.broker.stageErr = deferral.Errorf(deferral.Internal, "no projection")
	r.refused(r.publish("p1"), codes.Internal)
	r.said("publish-block private", "publish-block private")
	if len(r.broker.volumes) != 1 {
		t.Error("the published volume has gone")
	}
}

func TestDriverWithoutBlockAccess(t *testing.T) {
	r := newRig(t, deferAll)
	r.driver.fail("stage-block", status.Error(codes.InvalidArgument, "block access is not supported"))
	_, err := r.kubelet.NodeStageVolume(t.Context(), r.stageReq())
	r.refused(err, codes.InvalidArgument, driverName, "block access is not supported", `rule "all"`, "volumeMode Block")
	r.clean()
	r.driver.fail("stage-block", status.Error(codes.DeadlineExceeded, "slow"))
	_, err = r.kubelet.NodeStageVolume(t.Context(), r.stageReq())
	r.refused(err, codes.DeadlineExceeded)
	r.driver.fail("stage-block", nil)
	r.driver.said()
	r.unstage() // what may have happened is undone
	r.said("unstage private")
	r.clean()
}

func TestWhatCannotBeDeferredIsAnError(t *testing.T) {
	r := newRig(t, deferAll)
	shared := csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	stage := r.stageReq()
	stage.VolumeCapability = mountCap(shared, "ext4")
	_, err := r.kubelet.NodeStageVolume(t.Context(), stage)
	r.refused(err, codes.Unimplemented, "MULTI_NODE_MULTI_WRITER", "several nodes", `rule "all"`)
	r.stage()
	r.driver.said()
	publish := r.publishReq("p1")
	publish.VolumeContext[ephemeralKey] = "true"
	_, err = r.kubelet.NodePublishVolume(t.Context(), publish)
	r.refused(err, codes.Unimplemented, "ephemeral", "generic ephemeral")
	publish = r.publishReq("p1")
	publish.VolumeCapability.GetMount().MountFlags = []string{"password=hunter2"}
	_, err = r.kubelet.NodePublishVolume(t.Context(), publish)
	r.refused(err, codes.InvalidArgument, "secret")
	if strings.Contains(err.Error(), "hunter2") {
		t.Errorf("the secret is in the error: %v", err)
	}
	r.said("publish-block private", "unpublish private")
	r.unstage()
	r.clean()
}

func TestSecondPod(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.ok(nil, r.publish("p1"))
	r.driver.said()
	r.refused(r.publish("p2"), codes.FailedPrecondition, r.target("p1"), "wait until the other pod is gone")
	r.said()
	r.ok(nil, r.unpublish("p1"))
	r.ok(nil, r.publish("p2"))
	r.ok(nil, r.unpublish("p2"))
	r.unstage()
	r.clean()
}

func TestReadersShare(t *testing.T) {
	r := newRig(t, deferAll)
	rox := csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	stage := r.stageReq()
	stage.VolumeCapability = mountCap(rox, "ext4")
	r.ok(r.kubelet.NodeStageVolume(t.Context(), stage))
	for _, pod := range []string{"p1", "p2"} {
		publish := r.publishReq(pod)
		publish.VolumeCapability = mountCap(rox, "ext4", "noatime", "rw", `context="system_u:object_r:container_file_t:s0"`)
		r.ok(r.kubelet.NodePublishVolume(t.Context(), publish))
		if flags := strings.Join(r.broker.asked.MountFlags, ","); flags != "noatime,ro" {
			t.Errorf("flags for the sandbox: %s", flags)
		}
	}
}

func TestStatsComeFromTheSandbox(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.ok(nil, r.publish("p1"))
	ask := &csi.NodeGetVolumeStatsRequest{VolumeId: "vol-1", VolumePath: r.target("p1")}
	_, err := r.kubelet.NodeGetVolumeStats(t.Context(), ask)
	r.refused(err, codes.Unavailable)
	r.sandboxes.known = &stats.Known{At: time.Unix(1e9, 0), Report: deferral.Report{Usage: []deferral.Usage{{Total: 5}}}}
	reply, err := r.kubelet.NodeGetVolumeStats(t.Context(), ask)
	if err != nil || !reply.GetVolumeCondition().GetAbnormal() || reply.GetUsage()[0].GetTotal() != 5 ||
		!strings.Contains(reply.GetVolumeCondition().GetMessage(), "2001-09-09") {
		t.Errorf("last known: %v, %v", reply, err)
	}
	r.broker.bound[r.target("p1")] = "s1"
	reply, err = r.kubelet.NodeGetVolumeStats(t.Context(), ask)
	if err != nil || reply.GetVolumeCondition().GetAbnormal() || reply.GetUsage()[0].GetTotal() != 10 || reply.GetUsage()[0].GetUnit() != csi.VolumeUsage_BYTES {
		t.Errorf("fresh: %v, %v", reply, err)
	}
	if calls := r.driver.said(); len(calls) != 2 {
		t.Errorf("the driver was asked: %q", calls)
	}
}

func TestGrowth(t *testing.T) {
	r := newRig(t, deferAll)
	r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_EXPAND_VOLUME)
	r.stage()
	r.ok(nil, r.publish("p1"))
	r.driver.said()
	ask := &csi.NodeExpandVolumeRequest{
		VolumeId: "vol-1", VolumePath: r.target("p1"), StagingTargetPath: r.staging(), VolumeCapability: mountCap(rwo, "ext4"),
		CapacityRange: &csi.CapacityRange{RequiredBytes: 2 << 30},
	}
	expand := func() error {
		_, err := r.kubelet.NodeExpandVolume(t.Context(), ask)
		return err
	}
	r.refused(expand(), codes.FailedPrecondition, "has not grown the device")
	r.said("expand-block private")
	r.driver.grown = func() { r.broker.size = 2 << 30 }
	r.refused(expand(), codes.FailedPrecondition, "cannot grow the filesystem", "kata")
	r.broker.abilities.GrowsAtMount = true
	r.ok(nil, expand())
	if v := r.broker.volumes[r.target("p1")]; v.GrowTo != 2<<30 {
		t.Errorf("grow at mount: %d", v.GrowTo)
	}
	r.broker.bound[r.target("p1")] = "s1"
	ask.VolumePath = r.staging() // kubelet may name it by the staging path
	r.ok(nil, expand())
	r.sandboxes.err = deferral.Errorf(deferral.Unsupported, "volume v: the agent does not resize")
	r.refused(expand(), codes.FailedPrecondition, "the agent does not resize")
	r.sandboxes.err = deferral.Errorf(deferral.Timeout, "volume v: hangs")
	r.refused(expand(), codes.DeadlineExceeded)
	ask.CapacityRange.LimitBytes = 1
	r.refused(expand(), codes.InvalidArgument)
}

func TestSecretsStayInMemory(t *testing.T) {
	r := newRig(t, deferAll)
	const secret, token = "s3cr3t-value", "tok3n-value"
	stage := r.stageReq()
	stage.Secrets = map[string]string{"key": secret}
	stage.VolumeContext = map[string]string{"csi.storage.k8s.io/serviceAccount.tokens": token, "pool": "rbd"}
	r.ok(r.kubelet.NodeStageVolume(t.Context(), stage))
	asked, _ := r.driver.last("stage-block").(*csi.NodeStageVolumeRequest)
	if asked.GetSecrets()["key"] != secret || asked.GetVolumeContext()["csi.storage.k8s.io/serviceAccount.tokens"] != token {
		t.Error("the driver was not given the secrets")
	}
	for _, name := range files(t, r.cfg.StateDir) {
		raw, readErr := os.ReadFile(name)
		if readErr != nil || strings.Contains(string(raw), secret) || strings.Contains(string(raw), token) ||
			strings.Contains(string(raw), "czNjcjN0LXZhbHVl") { // base64
			t.Errorf("%s holds a secret, or cannot be read: %v", name, readErr)
		}
	}
	publish := r.publishReq("p1")
	publish.Secrets = map[string]string{"key": secret}
	r.driver.fail("publish-block", status.Error(codes.Internal, "login with "+secret+" failed"))
	_, err := r.kubelet.NodePublishVolume(t.Context(), publish)
	r.refused(err, codes.Internal, "login with [redacted] failed")
}
