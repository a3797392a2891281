// Package decision decides which volumes of CSI requests are deferred. It does no I/O: the request, the pod, the
// rules and the state of the node go in, a verdict or an error that people read comes out.
package decision

import (
	"cmp"
	"slices"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// heldOnHost is the rule of a volume that the host has mounted for some pod: it stays there until no pod has it.
const heldOnHost = "held as it is while a pod has it"

// Rules is what decides besides the request.
type Rules struct {
	Policy *policy.Policy
	// DefaultHandler is the runtime handler where a rule names none.
	DefaultHandler string
	// Abilities returns what the sandboxes of a runtime handler can do.
	Abilities func(handler string) deferral.Abilities
}

// State is what the node has of a volume before a call.
type State struct {
	// Published is the volume at the target of a publish, where it is deferred already.
	Published *deferral.Status
	// Elsewhere is the volume at the targets of other pods that have it deferred.
	Elsewhere []deferral.Status
	// OnHost are the targets of other pods for which the driver has mounted the volume.
	OnHost []string
	// Raw are the targets of other pods that have the volume as a raw device; true is for one that only reads.
	Raw map[string]bool
	// PathOnHost is set where the driver itself has mounted the target of a publish, or
	// the staging path of a stage without a record.
	PathOnHost bool
	// Staged is how the volume is staged, or nil.
	Staged *Staged
	// Holder names the pod at a target in OnHost. It is called only for the text of an error.
	Holder func(target string) string
}

// Staged is how a volume is staged, and by which rule.
type Staged struct {
	AsDevice bool
	Rule     string
}

// kept is the verdict of a volume on record. Its rule is empty where the driver published the volume
// through the Runtime API by itself. Of a lost volume the handler is not known.
func (r *Rules) kept(status *deferral.Status) policy.Verdict {
	v := policy.Verdict{Defer: true, Handler: cmp.Or(status.Handler, r.DefaultHandler), Format: volume.FormatNever}
	if status.Origin != nil {
		v.Rule = status.Origin.Rule
	}
	return v
}

// KeptAtPublish is the verdict of a volume that a pod has at the target already: kubelet
// repeats its calls. It needs no pod, so the call does not depend on the cluster.
func (r *Rules) KeptAtPublish(state *State) (verdict policy.Verdict, kept bool) {
	switch {
	case state.Published != nil:
		return r.kept(state.Published), true
	case state.PathOnHost:
		return policy.Verdict{Rule: heldOnHost}, true
	default:
		return policy.Verdict{}, false
	}
}

// Publish decides for a publish. The pod is nil where no cluster is asked.
func (r *Rules) Publish(req *VolumeRequest, state *State, pod *PodContext) (policy.Verdict, error) {
	verdict, err := r.byPolicy(req, pod)
	if err != nil {
		return verdict, err
	}
	if verdict, err = r.alignWithOtherPods(req, state, pod, verdict); err != nil {
		return verdict, err
	}
	return verdict, cmp.Or(r.CheckMark(req, &verdict), r.checkContainers(req, &verdict, pod))
}

// CheckMark refuses a mount by this node's kernel of what a guest may have written, unless the policy allows it. The
// sandboxes of the handler that had the volume may have it again: which of them are virtual machines is not known here.
func (r *Rules) CheckMark(req *VolumeRequest, verdict *policy.Verdict) error {
	mark := req.Mark
	if mark == nil || verdict.Defer && (!r.Abilities(verdict.Handler).HostMounts || verdict.Handler == mark.Handler) {
		return nil
	}
	then := r.Policy.ThenOnHost(req.Input, mark.Rule)
	if then == policy.HostAllowed || mark.Err != nil && then == "" {
		return nil
	}
	return refusal.WithParty(refusal.PartyPolicy, hadBySandbox(req, mark))
}

func (r *Rules) byPolicy(req *VolumeRequest, pod *PodContext) (policy.Verdict, error) {
	verdict, err := r.Policy.Decide(pod.complete(req))
	if verdict.Defer {
		verdict.Handler = cmp.Or(verdict.Handler, r.DefaultHandler)
	}
	return verdict, refusal.WithParty(refusal.PartyPolicy, err)
}

// alignWithOtherPods compares the verdict with the way in which other pods have the volume: if
// a sandbox and the host's kernel mount it at once, they destroy the filesystem. If neither
// the request nor a known pod contradicts, the other pods' way is kept.
func (r *Rules) alignWithOtherPods(req *VolumeRequest, state *State, pod *PodContext, verdict policy.Verdict) (policy.Verdict, error) {
	deferred := len(state.Elsewhere) > 0
	if !deferred && len(state.OnHost) == 0 || verdict.Defer == deferred {
		return verdict, nil
	}
	if req.Requested || pod != nil || (deferred && state.Elsewhere[0].Origin.Rule == policy.RuleRequested) {
		return verdict, refusal.WithParty(refusal.PartyVolume, publishedOtherwise(req, &verdict, deferred, state.firstHolder(req)))
	}
	if deferred {
		return r.kept(&state.Elsewhere[0]), nil
	}
	return policy.Verdict{Rule: heldOnHost}, nil
}

// firstHolder names the first of the other pods that have the volume.
func (s *State) firstHolder(req *VolumeRequest) string {
	if len(s.Elsewhere) > 0 {
		return holder(req, &s.Elsewhere[0])
	}
	return s.Holder(s.OnHost[0])
}

// holder is the pod that has a volume, where that is known, else the target. A pod of a StatefulSet that was deleted by
// force has the name of the one that the request is for.
func holder(req *VolumeRequest, status *deferral.Status) string {
	if status.Held != nil {
		free := *status
		free.Held = nil
		return holder(req, &free) + ", whose device is still open in " + status.Held.Processes
	}
	if csi := status.Origin; csi != nil && csi.PodName != "" {
		text := PodText(csi.PodNamespace, csi.PodName)
		if csi.PodNamespace == req.PodNamespace && csi.PodName == req.PodName {
			text += ", another one of this name with the UID " + kubelet.PodOf(status.Target)
		}
		return text
	}
	return status.Target
}

// checkContainers refuses what the pod's containers cannot get of a volume that the sandbox mounts.
func (r *Rules) checkContainers(req *VolumeRequest, verdict *policy.Verdict, pod *PodContext) error {
	if !verdict.Defer || pod == nil {
		return nil
	}
	if pod.Volume == nil {
		return pod.Missing // it may be mounted in a way that does not work: never a guess
	}
	paths := pod.Volume.SubPaths
	if len(paths) == 0 || r.Abilities(verdict.Handler).SubPaths {
		return nil
	}
	return refusal.WithParty(refusal.PartyHandler, noSubPaths(req, verdict, paths[0]))
}

// KeptAtStage is the verdict of a volume that some pod has, and whether it is staged as a
// device: kubelet repeats the stage after its restart.
func (r *Rules) KeptAtStage(state *State) (verdict policy.Verdict, asDevice, kept bool) {
	switch {
	case len(state.Elsewhere) > 0:
		return r.kept(&state.Elsewhere[0]), state.Elsewhere[0].Origin.Way == volume.WayBlock, true
	case len(state.OnHost) > 0 && state.Staged != nil:
		return policy.Verdict{Rule: state.Staged.Rule}, state.Staged.AsDevice, true
	case state.PathOnHost:
		return policy.Verdict{Rule: heldOnHost}, false, true
	default:
		return policy.Verdict{}, false, false
	}
}

// Stage decides for a stage. The pod is nil where no cluster is asked.
func (r *Rules) Stage(req *VolumeRequest, pod *PodContext) (policy.Verdict, error) {
	verdict, err := r.byPolicy(req, pod)
	if err == nil {
		err = r.CheckMark(req, &verdict)
	}
	return verdict, err
}

// StageForPods decides for a stage, which names no pod, by the pods of this node that use the
// volume, and names the pod that decided in the request. If the pods want it in several ways, the
// first of them that is not refused decides; each publish then decides for itself.
func (r *Rules) StageForPods(req *VolumeRequest, pods []Pod) (policy.Verdict, error) {
	var first policy.Verdict
	refused, readOnly := refusal.WithParty(refusal.PartyPods, noPodKnown(req)), req.ReadOnly
	for i := range pods {
		var verdict policy.Verdict
		found, err := pods[i].ForVolume(req.Driver, req.VolumeID, "")
		if err == nil {
			req.ReadOnly = readOnly || found.Volume != nil && found.Volume.ReadOnly // as its publish will say
			verdict, err = r.Stage(req, found)
		}
		if err == nil || i == 0 {
			req.NamePod(&pods[i])
			first, refused = verdict, err
		}
		if err == nil {
			break
		}
	}
	return first, refused
}

// CheckDeferrable refuses a volume that several nodes may write: with block access it would
// lose the protection that the driver gives to a filesystem that several nodes mount.
func CheckDeferrable(req *VolumeRequest, verdict *policy.Verdict) error {
	if !req.ReadOnly && slices.Contains(severalNodes, req.Capability.GetAccessMode().GetMode()) {
		return refusal.WithParty(refusal.PartyVolume, severalNodesWrite(req, verdict))
	}
	return nil
}

// CheckSecondWriter refuses early what the claim on the device would refuse late, before the driver is asked.
func CheckSecondWriter(req *VolumeRequest, state *State, pod *PodContext) error {
	for target, reads := range state.Raw {
		if state.Published == nil && (!req.ReadOnly || !reads) {
			return refusal.WithParty(refusal.PartyVolume, sandboxBesideRaw(req, state.Holder(target)))
		}
	}
	other := conflicting(req.ReadOnly, state.Elsewhere)
	if other == nil {
		return nil
	}
	// kubelet tells a driver of the claim's readOnly only, not of the containers'.
	couldShare := !req.ReadOnly && pod != nil && pod.Volume != nil && pod.Volume.ReadOnlyMounts
	return refusal.WithParty(refusal.PartyVolume, secondWriter(req, holder(req, other), couldShare))
}

// CheckRawDevice refuses to publish a volume as a raw device while a sandbox has its
// filesystem: a second persistent volume may name the same volume.
func CheckRawDevice(req *VolumeRequest, elsewhere []deferral.Status) error {
	if other := conflicting(req.ReadOnly, elsewhere); other != nil {
		return refusal.WithParty(refusal.PartyVolume, rawBesideSandbox(req, holder(req, other)))
	}
	return nil
}

// conflicting is the first pod that cannot share the device with another one.
func conflicting(readOnly bool, all []deferral.Status) *deferral.Status {
	for i := range all {
		if !readOnly || !all[i].ReadOnly {
			return &all[i]
		}
	}
	return nil
}

// CheckSameVolume refuses a call on a target that has another volume.
func CheckSameVolume(v *volume.Volume, driver, volumeID string) error {
	if v.Origin == nil || (v.Driver == driver && v.Origin.VolumeID == volumeID) {
		return nil
	}
	return refusal.WithParty(refusal.PartyRequest, anotherVolume(v, driver, volumeID))
}
