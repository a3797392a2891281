package csi

import (
	"context"
	"errors"
	"slices"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

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
	if p.state.Published == nil { // else a pod has it already, and the persistent volume may have been edited since
		if err := decision.CheckDeferrable(p.w, &p.verdict); err != nil {
			return nil, err
		}
	}
	if err := decision.CheckSecondWriter(p.w, &p.state, p.pod); err != nil {
		return nil, err
	}
	switch {
	case way == volume.WayBlock:
		return (&blockPublish{call: p, has: has}).run(ctx)
	case !has.Native:
		return nil, refusal.WithParty(refusal.PartyDriver, cannotDeferAnyMore(p.target, p.id.Driver))
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
	if on != nil {
		if asDevice, err := p.proxy.private.Published(p.id, p.target); asDevice || err != nil {
			return volume.WayBlock, err
		}
	}
	switch {
	case has.Native:
		return volume.WayNative, nil
	case on != nil:
		return "", nil
	default:
		return volume.WayBlock, nil
	}
}

// handOver hands the volume over to the broker, with what the sandbox has to mount.
func (p *publishCall) handOver(ctx context.Context, in volume.Instruction, readOnly bool, has *staging.Capabilities) error {
	in.MountFlags = decision.MountFlags(in.MountFlags, readOnly, p.rules.Abilities(p.verdict.Handler).SELinux)
	in.Group, in.GroupPolicy = p.group()
	if on := p.onRecord(); on != nil && on.ReadOnly == slices.Contains(in.MountFlags, "ro") {
		in.MountFlags = on.MountFlags
	}
	in.Target, in.Driver, in.Handler = p.target, p.id.Driver, p.verdict.Handler
	in.Origin.VolumeID, in.Origin.Rule, in.Origin.AccessMode = p.id.ID, p.verdict.Rule, p.w.AccessMode
	in.Origin.PodNamespace, in.Origin.PodName, in.Origin.PVC = p.w.PodNamespace, p.w.PodName, p.w.PVC
	if has.Stage {
		in.Origin.Staging = p.req.GetStagingTargetPath()
	}
	marked, err := p.mark(slices.Contains(in.MountFlags, "ro"))
	if err != nil {
		return err
	}
	v, err := p.proxy.volumes.Defer(ctx, in)
	if err == nil {
		p.logHazards(v)
		return nil
	}
	if marked && p.state.Published == nil { // the pod has not started
		err = refusal.JoinUndo(p.target, err, p.proxy.marks.Remove(p.id))
	}
	return refusal.WithBrokerParty(p.namingOwner(err))
}

// mark marks the volume before a sandbox gets it read-write.
func (p *publishCall) mark(readOnly bool) (marked bool, err error) {
	if readOnly {
		return false, nil
	}
	mark := &decision.Mark{Driver: p.id.Driver, VolumeID: p.id.ID, Rule: p.verdict.Rule, Handler: p.verdict.Handler}
	marked, err = p.proxy.mark(p.rules, p.w.Input, p.w.Mark, mark, p.state.Published != nil)
	return marked, refusal.WithParty(refusal.PartyNode, err)
}

// namingOwner adds to the refusal of a device that another volume owns the pod of that volume.
func (p *publishCall) namingOwner(err error) error {
	owned, is := errors.AsType[*claim.OwnedError](err)
	if !is {
		return err
	}
	_, other, failed := p.proxy.front.find(owned.Target)
	if failed != nil || other == nil || other.Origin == nil || other.Origin.PodName == "" {
		return err
	}
	return volume.Errorf(volume.KindOf(err), "%w (that volume is of %s)", err, decision.PodText(other.Origin.PodNamespace, other.Origin.PodName))
}

// group returns the group that must own the files.
func (p *publishCall) group() (string, volume.GroupPolicy) {
	if on := p.onRecord(); on != nil {
		return on.Group, on.GroupPolicy
	}
	return decision.Group(p.w, p.pod)
}

// onRecord is the volume of a repeated publish, whose mount options and group stay as they are: those of the persistent
// volume, and what kubelet and the driver make of them, may change while a pod has it. Of a lost volume they are not known.
func (p *publishCall) onRecord() *deferral.Status {
	if on := p.state.Published; on != nil && on.Origin != nil {
		return on
	}
	return nil
}

// logHazards logs what the pod's runtime will do wrong with the volume, before the pod's
// containers start. A repeated publish logs nothing.
func (p *publishCall) logHazards(v *volume.Volume) {
	if p.state.Published != nil || p.pod == nil {
		return
	}
	handler := p.pod.Pod.RuntimeHandler
	log := p.proxy.log.With(zap.String("pod", podName(p.w.PodNamespace, p.w.PodName)), zap.String("target", p.target),
		zap.String("runtime_handler", refusal.OneLine(handler)))
	for _, hazard := range decision.Hazards(p.verdict.Handler, p.pod) {
		log.Warn(hazard.Text, zap.Strings("containers", hazard.Containers), zap.String("name_in_pod", refusal.OneLine(p.pod.Volume.Name)))
	}
	// Where the handler's name does not say runtime-rs this is known with the first stats.
	disks := p.proxy.cfg.Disks
	if v.Group != "" && decision.IsRuntimeRS(handler) && disks.LacksGroup(v) {
		log.Warn(runtime.GroupIgnored, zap.String("group", v.Group))
	}
}
