package csi

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
)

// publishCall is one NodePublishVolume of a filesystem volume. Its caller holds the
// volume's lock.
type publishCall struct {
	proxy    *driverProxy
	req      *csi.NodePublishVolumeRequest
	w        *decision.VolumeRequest
	target   string
	rec      staging.Record
	state    decision.State
	removing bool                 // the removal of the volume at this target was begun
	pod      *decision.PodContext // nil where no cluster is asked, or the pod is not needed
	verdict  policy.Verdict
	forward  forwardFunc
}

func newPublishCall(
	proxy *driverProxy, req *csi.NodePublishVolumeRequest, w *decision.VolumeRequest, forward forwardFunc,
) (*publishCall, error) {
	p := &publishCall{
		proxy: proxy, req: req, w: w, target: w.Path, forward: forward,
		rec: proxy.front.store.Records.Get(proxy.driver.ID(w.VolumeID)),
	}
	found, known, err := proxy.front.find(p.target)
	if err != nil {
		return nil, err
	}
	p.removing = known && found.Removing
	if known && !p.removing {
		p.state.Published = &found
		if w.Capability.GetMount().GetFsType() == "" {
			w.FSType = cmp.Or(found.FSType, w.FSType) // the default may be another one by now
		}
	}
	for _, status := range proxy.front.cfg.Volumes.OfOrigin(w.Driver, w.VolumeID) {
		if !known || status.Key != found.Key {
			p.state.Elsewhere = append(p.state.Elsewhere, status)
		}
	}
	p.state.OnHost, p.state.Raw = staging.Without(p.rec.OnHost, p.target), p.rec.Raw
	return p, nil
}

func (p *publishCall) run(ctx context.Context) ([]byte, error) {
	err := p.checkTarget(ctx)
	if err == nil {
		err = p.decide(ctx)
	}
	if err == nil && !p.verdict.Defer {
		return p.publishOnHost(ctx)
	}
	var reply []byte
	if err == nil {
		reply, err = p.publishDeferred(ctx)
	}
	return reply, p.refuse(p.finishError(ctx, err))
}

// checkTarget refuses a target that has another volume, and finishes a removal of the same
// one that was begun.
func (p *publishCall) checkTarget(ctx context.Context) error {
	if p.state.Published != nil {
		return decision.CheckSameVolume(p.state.Published.Volume, p.w.Driver, p.w.VolumeID)
	}
	if err := p.proxy.front.refuseHeld(ctx, p.proxy.driver.ID(p.w.VolumeID)); err != nil {
		return err
	}
	if !p.removing {
		return refusal.WithParty(volume.PartyVolume, p.proxy.front.refuseLost(p.proxy.driver.ID(p.w.VolumeID), p.target))
	}
	if _, err := p.proxy.front.cfg.Volumes.Release(ctx, p.target); err != nil {
		return refusal.WithBrokerParty(removalUnfinished(p.target, err))
	}
	return nil
}

// decide sets the verdict: that of an earlier publish at the target, else one by the policy
// and the other pods.
func (p *publishCall) decide(ctx context.Context) (err error) {
	if p.state.Published == nil {
		p.state.PathOnHost = slices.Contains(p.rec.OnHost, p.target) || staging.DriverMounted(p.req.GetStagingTargetPath(), p.target)
	}
	var kept bool
	if p.verdict, kept = decision.KeptAtPublish(&p.state); kept {
		return nil
	}
	if p.pod, err = p.proxy.front.podFor(ctx, p.w); err != nil {
		return err
	}
	p.state.Holder = func(target string) string { return p.proxy.front.podAt(ctx, target) }
	p.verdict, err = p.proxy.front.rules().Publish(p.w, &p.state, p.pod)
	return err
}

// finishError undoes a deferred publish that ends with a final code, after which kubelet never
// asks to unpublish: nothing may be left then of this call, or of an earlier one whose answer
// was uncertain. If something is left, the code becomes one that kubelet retries.
func (p *publishCall) finishError(ctx context.Context, err error) error {
	if err == nil || !refusal.IsFinal(err) {
		return err
	}
	if p.state.Published != nil {
		return refusal.NotFinal(p.target, err)
	}
	return p.undo(ctx, err, func(ctx context.Context) error {
		if err := p.unpublishDevice(ctx); err != nil {
			return err
		}
		return p.unpublishUncertain(ctx)
	})
}

// undo undoes what this call began. A volume that an earlier call published stays so.
func (p *publishCall) undo(ctx context.Context, cause error, undo func(context.Context) error) error {
	if p.state.Published != nil {
		return cause
	}
	ctx, cancel := staging.UndoContext(ctx)
	defer cancel()
	return refusal.JoinUndo(p.target, cause, undo(ctx))
}

func (p *publishCall) refuse(err error) error {
	draft := p.proxy.refusalDraft(p.w, &p.verdict, p.knownPod())
	if p.pod == nil {
		draft.PodUID, _ = p.proxy.front.podUID(p.w.Context, p.target) // where the two differ that is the error
		draft.PodNamespace, draft.PodName = decision.PodNames(nil, p.w)
	}
	return p.proxy.recordRefusal(draft, err)
}

// publishOnHost lets the driver mount the volume. The target is recorded before: a pod that
// has the volume keeps it from being deferred for another.
func (p *publishCall) publishOnHost(ctx context.Context) ([]byte, error) {
	err := p.unpublishUncertain(ctx)
	if err != nil {
		err = interrupted(p.target, err)
	} else {
		err = p.ensureStagedOnHost(ctx)
	}
	if err == nil {
		err = p.proxy.driver.CheckWriting(p.w.VolumeID)
	}
	if err != nil {
		return nil, p.refuse(err)
	}
	p.proxy.front.forgetRefusal(p.target) // it may have been refused, and the policy says otherwise now
	known := slices.Contains(p.rec.OnHost, p.target)
	if !known {
		p.rec.OnHost = append(p.rec.OnHost, p.target)
		p.proxy.stager.RecordOnHost(&p.rec)
	}
	reply, err := p.forward(ctx)
	if err != nil && !known && refusal.IsFinal(err) {
		p.rec.OnHost = staging.Without(p.rec.OnHost, p.target)
		p.proxy.stager.RecordOnHost(&p.rec)
	}
	return reply, err
}

// ensureStagedOnHost makes sure that the driver has staged the volume as kubelet asked,
// and that nothing is left of a publish as a device that was interrupted.
func (p *publishCall) ensureStagedOnHost(ctx context.Context) error {
	if p.state.Published == nil {
		if err := p.unpublishDevice(ctx); err != nil {
			return interrupted(p.target, err)
		}
	}
	path := p.req.GetStagingTargetPath()
	asDevice, err := p.proxy.stager.StagedDevice(p.w.VolumeID, path)
	switch {
	case p.rec.Stage == nil && err != nil:
		return err
	case p.rec.Stage == nil && asDevice && !staging.IsMountPoint(path):
		return stageLost(p.w) // the driver could show the pod the bare directory
	case p.rec.Stage == nil, p.rec.Stage.Done(false):
		return nil
	default:
		return p.proxy.stager.Restage(ctx, &p.rec, false, p.verdict.Rule)
	}
}

// publishDeferred hands the volume to the sandbox, in one of two ways.
func (p *publishCall) publishDeferred(ctx context.Context) ([]byte, error) {
	has, err := p.proxy.driver.Capabilities(ctx)
	if err != nil {
		return nil, err
	}
	way, err := p.way(has)
	if err != nil {
		return nil, err
	}
	if way == "" {
		reply, err := p.forward(ctx)
		return reply, p.proxy.driver.Error("asked to publish the volume", err, staging.SecretsOf(p.req))
	}
	if err := decision.CheckDeferrable(p.w, &p.verdict); err != nil {
		return nil, err
	}
	if err := decision.CheckSecondWriter(p.w, &p.state, p.pod); err != nil {
		return nil, err
	}
	switch {
	case way == volume.WayBlock:
		return (&blockPublish{call: p, has: has, device: p.device()}).run(ctx)
	case !has.Native:
		return nil, refusal.WithParty(volume.PartyDriver, cannotDeferAnyMore(p.target, p.w.Driver))
	default:
		return (&nativePublish{call: p, has: has}).run(ctx)
	}
}

// way returns how the driver is asked. While the volume is on record the way stays the same,
// for a second reader too: the device is staged in that way, under the sandboxes that have it.
// A record without an origin is of a driver that called the Runtime API, or was lost. The way
// is "" for a driver that calls the Runtime API without being asked to defer.
func (p *publishCall) way(has *staging.Capabilities) (string, error) {
	on := p.state.Published
	if on == nil && len(p.state.Elsewhere) > 0 {
		on = &p.state.Elsewhere[0]
	}
	if on != nil && on.Origin != nil {
		return on.Origin.Way, nil
	}
	asDevice, err := p.proxy.front.store.Private.Published(p.proxy.driver.ID(p.w.VolumeID), p.target)
	switch {
	case on != nil && (asDevice || err != nil):
		return volume.WayBlock, err
	case has.Native:
		return volume.WayNative, nil
	case on != nil:
		return "", nil
	default:
		return volume.WayBlock, nil
	}
}

func (p *publishCall) device() string {
	return p.proxy.front.store.Private.Publish(p.proxy.driver.ID(p.w.VolumeID), p.target)
}

func (p *publishCall) unpublishDevice(ctx context.Context) error {
	return p.proxy.stager.UnpublishDevice(ctx, p.w.VolumeID, p.device())
}

// handOver hands the volume over to the broker, with what the sandbox has to mount.
func (p *publishCall) handOver(ctx context.Context, in volume.Instruction, has *staging.Capabilities) error {
	var err error
	if in.Group, in.GroupPolicy, err = p.group(); err != nil {
		return err
	}
	in.Target, in.Driver, in.Handler = p.target, p.w.Driver, p.verdict.Handler
	in.Origin.VolumeID, in.Origin.Rule, in.Origin.AccessMode = p.w.VolumeID, p.verdict.Rule, p.w.AccessMode
	in.Origin.PodNamespace, in.Origin.PodName = decision.PodNames(p.knownPod(), p.w)
	if has.Stage {
		in.Origin.Staging = p.req.GetStagingTargetPath()
	}
	marked, err := p.mark(slices.Contains(mountopt.Split(in.MountFlags), "ro"))
	if err != nil {
		return err
	}
	v, err := p.proxy.front.cfg.Volumes.Defer(ctx, in)
	if err == nil {
		p.logHazards(ctx, v)
	} else if marked && p.state.Published == nil { // the pod has not started
		err = refusal.JoinUndo(p.target, err, p.proxy.front.store.Marks.Remove(p.proxy.driver.ID(p.w.VolumeID)))
	}
	return refusal.WithBrokerParty(p.namingOwner(err))
}

// mark marks the volume before a sandbox gets it read-write.
func (p *publishCall) mark(readOnly bool) (marked bool, err error) {
	if readOnly {
		return false, nil
	}
	mark := staging.Mark{
		Driver: p.w.Driver, VolumeID: p.w.VolumeID, Rule: p.verdict.Rule, Handler: p.proxy.front.rules().Handler(&p.verdict),
	}
	marked, err = p.proxy.front.marker().mark(p.w.Input, mark, p.state.Published != nil)
	return marked, refusal.WithParty(volume.PartyNode, err)
}

// namingOwner adds to the refusal of a device that another volume owns the pod of that volume.
func (p *publishCall) namingOwner(err error) error {
	owned, is := errors.AsType[*claim.OwnedError](err)
	if !is {
		return err
	}
	other, known, failed := p.proxy.front.cfg.Volumes.Find(owned.Target)
	if failed != nil || !known || other.Origin == nil || other.Origin.PodName == "" {
		return err
	}
	return volume.Errorf(volume.KindOf(err), "%w (that volume is of %s)", err, decision.PodText(other.Origin.PodNamespace, other.Origin.PodName))
}

func (p *publishCall) knownPod() *decision.Pod {
	if p.pod == nil {
		return nil
	}
	return p.pod.Pod
}

// group returns the group that must own the files. For a published volume the group is on
// record, so the cluster is not asked again.
func (p *publishCall) group() (string, volume.GroupPolicy, error) {
	group, change, err := decision.Group(p.w, p.knownPod())
	if on := p.state.Published; err == nil && on != nil && change == "" && (group == "" || group == on.Group) {
		return on.Group, on.GroupPolicy, nil // kubelet sends no policy, and may send no group either
	}
	return group, change, err
}

func (p *publishCall) mountFlags(flags []string, readOnly bool) []string {
	return decision.MountFlags(flags, readOnly, p.proxy.front.cfg.Volumes.Abilities(p.verdict.Handler).SELinux)
}

// logHazards logs what the pod's runtime will do wrong with the volume, before the pod's
// containers start. A repeated publish logs nothing.
func (p *publishCall) logHazards(ctx context.Context, v *volume.Volume) {
	if p.state.Published != nil || p.pod == nil {
		return
	}
	namespace, name := decision.PodNames(p.pod.Pod, p.w)
	handler := p.pod.Pod.RuntimeHandler
	log := p.proxy.log.With(zap.String("pod", namespace+"/"+name), zap.String("volume", p.target),
		zap.String("runtimeHandler", refusal.OneLine(handler)))
	for _, hazard := range decision.Hazards(p.proxy.front.rules().Handler(&p.verdict), p.pod) {
		log.Warn(hazard.Text, zap.Strings("containers", hazard.Containers), zap.String("nameInPod", refusal.OneLine(p.pod.Volume.Name)))
	}
	// Where the handler's name does not say runtime-rs this is known with the first stats.
	if v.Group != "" && decision.IsRuntimeRS(handler) && p.proxy.front.cfg.LacksGroup(ctx, v) {
		log.Warn(volume.GroupIgnoredText, zap.String("group", v.Group))
	}
}
