package csi

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func markPolicy(then policy.ThenOnHost) *policy.Policy {
	return &policy.Policy{Rules: []policy.Rule{{Name: "kata", RuntimeHandlers: []string{"kata"}, Defer: true, ThenOnHost: then}}}
}

// markRig has a pod of kata, whose volumes are deferred, and one of runc.
func markRig(t *testing.T) *rig {
	t.Helper()
	return podRig(t, markPolicy(""), decision.Pod{UID: "kata", RuntimeHandler: "kata"}, decision.Pod{UID: "runc", RuntimeHandler: "runc"})
}

// use has a pod have the volume, which is staged by what that pod wants.
func (r *rig) use(pod string, readOnly bool) error {
	r.t.Helper()
	all := r.cfg.Pods
	defer func() { r.cfg.Pods = all; r.restart() }()
	known, _ := all.(fakePods)
	r.cfg.Pods = fakePods{pod: known[pod]}
	r.restart()
	if err := r.tryStage(r.stageReq()); err != nil {
		return err
	}
	publish := r.publishReq(pod)
	publish.Readonly = readOnly
	_, err := r.kubelet.NodePublishVolume(r.t.Context(), publish)
	if err == nil {
		err = r.unpublish(pod)
	}
	r.unstage()
	return err
}

func (r *rig) marks() []string {
	r.t.Helper()
	names, err := filepath.Glob(r.cfg.MarksDir + "/*")
	r.ok(nil, err)
	return names
}

func TestHostDoesNotMountWhatASandboxHad(t *testing.T) {
	r := markRig(t)
	r.ok(nil, r.use("kata", true))
	r.broker.stageErr = volume.Errorf(volume.InUse, "the device holds xfs")
	r.refused(r.use("kata", false), codes.FailedPrecondition, "holds xfs")
	r.broker.stageErr = nil
	check.Require(t, len(r.marks()) == 0, "marked, and no sandbox could write: %q", r.marks())
	r.ok(nil, r.use("runc", false))
	r.ok(nil, r.use("kata", false))
	mark := r.marks()[0]
	raw, err := os.ReadFile(mark)
	check.That(t, err == nil && strings.Contains(string(raw), `"driver":"`+driverName+`","volumeID":"vol-1","rule":"rule \"kata\"","handler":"kata"`),
		"%s, %v", raw, err)
	r.driver.said()
	refused := func(p *policy.Policy) {
		t.Helper()
		r.cfg.Policy = p
		for _, readOnly := range []bool{false, true} {
			r.refused(r.use("runc", readOnly), codes.PermissionDenied, "guest may have written", "thenOnHost: allow", mark)
		}
		r.said()
	}
	refused(markPolicy(""))
	refused(&policy.Policy{}) // no rule allows it any more
	r.ok(nil, os.MkdirAll(filepath.Dir(r.target("raw")), 0o750))
	r.ok(nil, r.publishRaw(rwo))
	r.ok(nil, r.unpublish("raw"))
	r.driver.said()
	r.cfg.Policy = markPolicy(policy.HostAllowed)
	r.ok(nil, r.use("runc", false))
	r.driver.said()
	r.ok(nil, os.WriteFile(mark, []byte("{"), 0o600))
	refused(markPolicy(""))
	r.ok(nil, r.use("kata", false))
	r.ok(nil, os.Remove(mark))
	r.ok(nil, r.use("runc", false))
}

// TestMountOverTheTargetIsNoPublish of a volume that a guest wrote: an inline volume of the pod may be named like it.
func TestMountOverTheTargetIsNoPublish(t *testing.T) {
	r := markRig(t)
	r.ok(nil, r.use("kata", false))
	r.mounted(r.target("runc"))
	r.driver.setCaps()
	publish := r.publishReq("runc")
	publish.StagingTargetPath = ""
	with := func(then policy.ThenOnHost, more bool, volumes ...decision.PodVolume) {
		r.cfg.Policy, r.cfg.Pods = markPolicy(then), fakePods{"runc": {UID: "runc", RuntimeHandler: "runc", Volumes: volumes, MoreVolumes: more}}
		r.restart()
		r.driver.said()
	}
	own := one(decision.PodVolume{Claim: "data"})[0]
	with(policy.HostAllowed, false, own, decision.PodVolume{Name: kubelet.VolumeName(r.target("runc")), Driver: "nfs.example.com"})
	r.refused(r.tryPublish(publish), codes.PermissionDenied, "inline volume")
	with(policy.HostAllowed, true, own)
	r.refused(r.tryPublish(publish), codes.PermissionDenied, "more volumes")
	with("", false, own)
	r.refused(r.tryPublish(publish), codes.PermissionDenied, "guest may have written")
	r.said()
	with(policy.HostAllowed, false, own)
	r.ok(nil, r.tryPublish(publish))
	r.said("publish-mount kubelet")
}

// TestRuleThatComesToRefuse counts for the volumes that sandboxes have.
func TestRuleThatComesToRefuse(t *testing.T) {
	for _, then := range []policy.ThenOnHost{policy.HostAllowed, ""} {
		r := podRig(t, markPolicy(policy.HostAllowed), decision.Pod{UID: "kata", RuntimeHandler: "kata"})
		r.begin("kata")
		r.cfg.Policy = markPolicy(then)
		r.restart()
		r.ok(nil, r.unpublish("kata"))
		check.That(t, (len(r.marks()) == 1) == (then == ""), "by %q: %q", then, r.marks())
	}
}

// TestMarksThatCannotBeRead keep only volumes from the host that a rule could have deferred.
func TestMarksThatCannotBeRead(t *testing.T) {
	r := markRig(t)
	r.ok(nil, os.Remove(r.cfg.MarksDir))
	r.ok(nil, os.Symlink("marks", r.cfg.MarksDir))
	r.refused(r.use("runc", false), codes.Internal, "not known whether", r.cfg.MarksDir)
	r.refused(r.use("kata", false), codes.Internal, "must be recorded", r.cfg.MarksDir)
	r.ok(nil, r.use("kata", true))
	other := markPolicy("")
	other.Rules[0].Drivers = []string{"other.example.com"}
	for _, p := range []*policy.Policy{other, markPolicy(policy.HostAllowed), {}} {
		r.cfg.Policy = p
		r.ok(nil, r.use("runc", false))
	}
}

// TestMarksThatAreGone are not replaced by none: a directory is created on a new node alone.
func TestMarksThatAreGone(t *testing.T) {
	r := markRig(t)
	marks, elsewhere := r.cfg.MarksDir, r.dir+"/disk/marks"
	r.cfg.MarksMade = r.dir + "/state-on-disk/marks-made"
	r.ok(nil, r.use("kata", false)) // starts anew, with a directory of an earlier version
	r.ok(nil, os.Rename(marks, r.dir+"/unmounted"))
	r.refused(r.use("runc", false), codes.Internal, "not known whether", marks)
	r.ok(nil, os.Symlink(r.dir+"/not-mounted", marks))
	r.refused(r.use("runc", false), codes.Internal, "not known whether", marks)
	r.cfg.MarksDir = elsewhere
	r.refused(r.use("runc", false), codes.Internal, "not known whether", elsewhere)
	r.ok(nil, os.MkdirAll(filepath.Dir(elsewhere), 0o700))
	r.ok(nil, os.Rename(r.dir+"/unmounted", elsewhere))
	r.refused(r.use("runc", false), codes.PermissionDenied, "guest may have written")
	r.ok(nil, os.RemoveAll(elsewhere))
	r.ok(nil, os.Mkdir(elsewhere, 0o700)) // by the operator
	r.ok(nil, r.use("runc", false))
	r.cfg.MarksDir, r.cfg.MarksMade = r.dir+"/new/marks", r.dir+"/new/made"
	r.ok(nil, r.use("runc", false))
}

// TestMarkOfAGuestKeepsHandlersOfTheHostAway: where the node's kernel mounts for a sandbox, it
// parses what a guest of another handler wrote.
func TestMarkOfAGuestKeepsHandlersOfTheHostAway(t *testing.T) {
	r := markRig(t)
	r.broker.hostMounts = "crust"
	r.cfg.Policy = markPolicy("")
	r.cfg.Policy.Rules = append(r.cfg.Policy.Rules, policy.Rule{Name: "crust", RuntimeHandlers: []string{"runc"}, Defer: true, Handler: "crust"})
	for range 2 {
		r.ok(nil, r.use("runc", false))
	}
	r.ok(nil, r.use("kata", false))
	r.refused(r.use("runc", true), codes.PermissionDenied, `handler "kata"`)
}

// TestPersistentVolumeNamedLikeAnInlineOne: kubelet stages no inline volume, so it is none.
func TestPersistentVolumeNamedLikeAnInlineOne(t *testing.T) {
	r := newRig(t, deferAll)
	stage, publish := r.stageReq(), r.publishReq("p1")
	stage.VolumeId, publish.VolumeId = inlineID, inlineID
	r.ok(nil, r.tryStage(stage))
	r.ok(nil, r.tryPublish(publish))
	marks := r.marks()
	check.That(t, len(marks) == 1, "marks: %q", marks)
}
