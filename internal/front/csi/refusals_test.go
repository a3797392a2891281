package csi

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestRefusalsComeAndGo(t *testing.T) {
	r := newRig(t, deferThenHost)
	r.cfg.DefaultHandler = "kata"
	r.restart()
	listed := func() []refusal.Refusal { return r.cfg.Refusals.Refused() }

	r.driver.fail("stage-block", status.Error(codes.InvalidArgument, "no block\naccess with hunter2-secret "+strings.Repeat("x", 9000)))
	stage := r.stageReq()
	stage.Secrets = map[string]string{"password": "hunter2-secret"}
	for range 2 {
		err := r.tryStage(stage)
		r.refused(err, codes.InvalidArgument, "no block access", "defer: false", "volume "+r.staging()+": driver "+driverName)
		check.That(t, !strings.Contains(err.Error(), "\n") && len(err.Error()) <= 2000, "not one sentence: %d bytes of %.200q", len(err.Error()), err)
	}
	got := listed()
	check.Require(t, len(got) == 1 && got[0].Party == refusal.PartyDriver && got[0].Count == 2 && got[0].Target == r.staging() &&
		got[0].Rule == `rule "all"` && got[0].Handler == "kata" && got[0].VolumeID == "vol-1" && got[0].AccessMode == "SINGLE_NODE_WRITER" &&
		!strings.Contains(got[0].Error, "hunter2"), "listed: %+v", got)
	one, ok := r.cfg.Refusals.Refusal(volume.KeyOf(r.staging()))
	check.That(t, ok && one.Error == got[0].Error, "by key: %+v, %v", one, ok)
	r.driver.fail("stage-block", nil)
	r.stage()
	got = listed()
	check.That(t, len(got) == 0, "after a success: %+v", got)

	r.ok(nil, r.publish("p1"))
	r.refused(r.publish("p2"), codes.FailedPrecondition, "one sandbox")
	r.broker.stageErr = volume.Errorf(volume.InUse, "the device holds xfs")
	r.refused(r.publish("p1"), codes.Aborted, "holds xfs")
	got = listed()
	check.That(t, len(got) == 2 && got[0].Party == refusal.PartyDevice && got[1].Party == refusal.PartyVolume && got[1].PodUID == "p2", "listed: %+v", got)
	r.broker.stageErr = nil
	r.ok(nil, r.unpublish("p1"))
	r.ok(nil, r.publish("p2"))
	check.Empty(t, listed(), "after all went well")
	r.refused(r.publish("p3"), codes.FailedPrecondition)
	r.ok(nil, r.unpublish("p2"))
	r.front.SetPolicy(&policy.Policy{})
	r.ok(nil, r.publish("p3")) // on the host: nobody refuses it any more
	check.Empty(t, listed(), "after it was mounted on the host")
	r.stop() // no call counts any more
	counted := r.observed.refused
	check.That(t, counted[refusal.PartyDriver] == 2 && counted[refusal.PartyVolume] == 2 && counted[refusal.PartyDevice] == 1 && r.observed.changes == 9,
		"counted %v, %d changes", counted, r.observed.changes)
}

// TestErrorsNameThePodOnRecord: also those of calls in which kubelet names no pod, and those about another volume.
func TestErrorsNameThePodOnRecord(t *testing.T) {
	r := newRig(t, deferAll)
	r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_EXPAND_VOLUME)
	r.stage()
	publish := r.publishReq("p1")
	publish.VolumeContext["csi.storage.k8s.io/pod.namespace"], publish.VolumeContext["csi.storage.k8s.io/pod.name"] = "team", "db-0"
	r.ok(nil, r.tryPublish(publish))
	want := "volume " + r.target("p1") + " of pod team/db-0: "
	r.broker.bound[r.target("p1")] = "s1"
	r.refused(r.unpublish("p1"), codes.Aborted, want+"the sandbox s1 has it")
	r.sandboxes.err = volume.Errorf(volume.Timeout, "volume %s: sandbox s1 does not answer", r.target("p1"))
	_, err := r.kubelet.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "vol-1", VolumePath: r.target("p1")})
	r.refused(err, codes.DeadlineExceeded, want+"sandbox s1 does not answer")
	r.refused(r.expand("p1"), codes.DeadlineExceeded, want+"sandbox s1 does not answer")

	stage := r.stageReq()
	stage.VolumeId, stage.StagingTargetPath = "vol-2", r.staging()+"-2"
	r.ok(nil, r.tryStage(stage))
	r.broker.stageErr = volume.Errorf(volume.InUse, "volume x: its device %w: it can have one", &claim.OwnedError{Target: r.target("p1")})
	publish = r.publishReq("p2")
	publish.VolumeId, publish.StagingTargetPath = "vol-2", stage.GetStagingTargetPath()
	r.refused(r.tryPublish(publish), codes.FailedPrecondition, "belongs to volume "+r.target("p1"), "(that volume is of the pod team/db-0)")
}

// TestADriversOwnErrorIsNoRefusal: the volume is none of ours, and the error is passed on as it is.
func TestADriversOwnErrorIsNoRefusal(t *testing.T) {
	r := newRig(t, &policy.Policy{})
	r.driver.fail("stage-mount", status.Error(codes.Internal, "two\nlines"))
	_, err := r.kubelet.NodeStageVolume(t.Context(), r.stageReq())
	check.That(t, status.Convert(err).Message() == "two\nlines", "got %v", err)
	r.driver.fail("stage-mount", nil)
	r.stage()
	r.driver.fail("publish-mount", status.Error(codes.Internal, "more\nlines"))
	err = r.publish("p1")
	check.That(t, status.Convert(err).Message() == "more\nlines", "got %v", err)
	check.Empty(t, r.cfg.Refusals.Refused(), "listed")
}

// TestEachRefusalIsOneSentence of the volume, who says no, and what to do.
func TestEachRefusalIsOneSentence(t *testing.T) {
	native := csi.NodeServiceCapability_RPC_Type(csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS)
	for name, c := range map[string]struct {
		prepare func(*rig, *csi.NodePublishVolumeRequest)
		party   refusal.Party
		todo    string
	}{
		"a network volume, as of SMB": {func(r *rig, _ *csi.NodePublishVolumeRequest) {
			network := volume.Instruction{Target: r.target("p1"), Type: volume.Network}
			r.broker.stageErr = deferral.Validate(&network)
		}, refusal.PartyHandler, "publish it on the host, or use a block volume"},
		"secrets among the mount options": {func(_ *rig, req *csi.NodePublishVolumeRequest) {
			req.VolumeCapability.GetMount().MountFlags = []string{"password=hunter2"}
		}, refusal.PartyRequest, "take it out of the mount options"},
		"a driver that answers nothing": {func(r *rig, _ *csi.NodePublishVolumeRequest) { r.driver.setCaps(native) },
			refusal.PartyDriver, "exclude the volume by a policy rule"},
		"several nodes write": {func(_ *rig, req *csi.NodePublishVolumeRequest) {
			req.VolumeCapability.AccessMode.Mode = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
		}, refusal.PartyVolume, "exclude it by a policy rule"},
		"an inline volume": {func(_ *rig, req *csi.NodePublishVolumeRequest) { req.VolumeId, req.StagingTargetPath = inlineID, "" },
			refusal.PartyDriver, "volumeClaimTemplate"},
		"a word that is none": {func(_ *rig, req *csi.NodePublishVolumeRequest) { req.VolumeContext[policy.ContextKey] = "yes\n" },
			refusal.PartyPolicy, `write "true" or "false"`},
		"no block access": {func(r *rig, _ *csi.NodePublishVolumeRequest) {
			r.driver.fail("publish-block", status.Error(codes.InvalidArgument, "only\nmounts"))
		}, refusal.PartyDriver, "exclude it by a policy rule"},
		"a full disk": {func(r *rig, _ *csi.NodePublishVolumeRequest) {
			r.broker.stageErr = volume.Errorf(volume.Exhausted, "volume %s: no space", r.target("p1"))
		}, refusal.PartyNode, "no space"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, deferAll)
			r.driver.setCaps()
			req := r.publishReq("p1")
			c.prepare(r, req)
			_, err := r.kubelet.NodePublishVolume(t.Context(), req)
			text := status.Convert(err).Message()
			check.That(t, err != nil && strings.HasPrefix(text, "volume "+r.target("p1")+": ") && strings.Count(text, r.target("p1")+": ") == 1 &&
				!strings.Contains(text, "\n") && strings.Contains(text, c.todo) && !strings.Contains(text, "hunter2"), "it says %q", text)
			got := r.cfg.Refusals.Refused()
			check.That(t, len(got) == 1 && got[0].Party == c.party && got[0].Error == text, "listed: %+v", got)
			r.ok(nil, r.unpublish("p1"))
			r.clean()
		})
	}
}
