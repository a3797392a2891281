package csi

import (
	"cmp"
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// publishCall is one NodePublishVolume of a filesystem volume. Its caller holds the volume's lock.
type publishCall struct {
	proxy    *driverProxy
	rules    *decision.Rules
	id       staging.VolumeID
	req      *csi.NodePublishVolumeRequest
	w        *decision.VolumeRequest
	target   string
	key      volume.Key
	device   string // the private path at which the driver publishes a device
	rec      staging.Record
	state    decision.State
	removing bool                 // the removal of the volume at this target was begun
	pod      *decision.PodContext // nil where no cluster is asked, or the pod is not needed
	verdict  policy.Verdict
	forward  forwardFunc
}

// publishVolume decides whether the pod's sandbox is to mount the volume, and hands it
// over, or lets the driver mount it.
func publishVolume(ctx context.Context, p *driverProxy, req *csi.NodePublishVolumeRequest, forward forwardFunc) ([]byte, error) {
	w, err := decision.PublishRequest(p.driver.Name, p.cfg.DefaultFSType, p.front.belowKubeletRoot(req.GetTargetPath()), req)
	if err != nil {
		return nil, err
	}
	isBlock := req.GetVolumeCapability().GetBlock() != nil
	if !isBlock && req.GetVolumeCapability().GetMount() == nil {
		return forward(ctx)
	}
	return p.withLock(ctx, req.GetVolumeId(), req.GetTargetPath(), forward, func(id staging.VolumeID) ([]byte, error) {
		if isBlock {
			return publishRaw(ctx, p, id, w, forward)
		}
		w.Mark = p.marks.Get(id)
		call, err := newPublishCall(p, id, req, w, forward)
		if err != nil {
			return nil, err
		}
		return call.run(ctx)
	})
}

func newPublishCall(
	proxy *driverProxy, id staging.VolumeID, req *csi.NodePublishVolumeRequest, w *decision.VolumeRequest, forward forwardFunc,
) (*publishCall, error) {
	p := &publishCall{
		proxy: proxy, rules: proxy.front.rules.Load(), id: id, req: req, w: w, target: w.Path, forward: forward,
		device: proxy.private.Publish(id, w.Path), rec: proxy.records.Get(id),
	}
	key, found, err := proxy.front.find(p.target)
	if err != nil {
		return nil, err
	}
	p.key, p.removing = key, found != nil && found.Removing
	if found != nil && !p.removing {
		p.state.Published = found
		if w.Capability.GetMount().GetFsType() == "" {
			w.FSType = cmp.Or(found.FSType, w.FSType) // the default may be another one by now
		}
	}
	for _, status := range proxy.volumes.OfOrigin(id.Driver, id.ID) {
		if status.Key != key {
			p.state.Elsewhere = append(p.state.Elsewhere, status)
		}
	}
	p.state.OnHost, p.state.Raw = staging.Without(p.rec.OnHost, p.target), p.rec.Raw
	return p, nil
}

func (p *publishCall) run(ctx context.Context) ([]byte, error) {
	err := p.decide(ctx)
	annotateVerdict(ctx, p.w, &p.verdict)
	call := telemetry.CallFrom(ctx)
	call.Repeated = p.state.Published != nil || p.state.PathOnHost
	if p.verdict.Defer || err != nil {
		call.Volume = string(p.key)
	}
	var reply []byte
	switch {
	case err == nil && !p.verdict.Defer:
		return p.publishOnHost(ctx)
	case err == nil:
		reply, err = p.publishDeferred(ctx)
	}
	return reply, p.proxy.recordRefusal(p.w, &p.verdict, p.finishError(ctx, err))
}

// decide sets the verdict: that of an earlier publish at the target, else one by the policy and the other pods.
func (p *publishCall) decide(ctx context.Context) (err error) {
	if err := p.checkTarget(ctx); err != nil {
		return err
	}
	mounted := false
	if p.state.Published == nil {
		uncertain := slices.Contains(p.rec.Uncertain, p.target) // then what is mounted is no pod's yet
		p.state.PathOnHost = slices.Contains(p.rec.OnHost, p.target)
		if !p.state.PathOnHost && !uncertain {
			if mounted, err = staging.MountedOnHost(ctx, p.target); err != nil {
				return err
			}
			p.state.PathOnHost = mounted
		}
	}
	var kept bool
	if p.verdict, kept = p.rules.KeptAtPublish(&p.state); kept {
		if mounted {
			return p.checkMounted(ctx)
		}
		return nil
	}
	if p.pod, err = p.proxy.front.podFor(ctx, p.w); err != nil {
		return err
	}
	p.state.Holder = func(target string) string { return p.proxy.front.podAt(ctx, target) }
	p.verdict, err = p.rules.Publish(p.w, &p.state, p.pod)
	return err
}

// checkMounted asks whether the mount at the target is the volume's, of which nothing is on record: the pod may have an
// inline volume that is named like this one, and so has its target. Where the pod is not known, it counts as this one's.
func (p *publishCall) checkMounted(ctx context.Context) error {
	pod, _ := p.proxy.front.podFor(ctx, p.w)
	if pod != nil && p.w.InlineName == "" && pod.Pod.MayHaveInline(kubelet.VolumeName(p.target)) {
		return refusal.WithParty(refusal.PartyPod, inlineAtTarget(p.target))
	}
	return p.rules.CheckMark(p.w, &p.verdict)
}

// checkTarget refuses a target that has another volume, and finishes a removal of the same one that was begun.
func (p *publishCall) checkTarget(ctx context.Context) error {
	if p.state.Published != nil {
		return decision.CheckSameVolume(p.state.Published.Volume, p.id.Driver, p.id.ID)
	}
	if err := p.proxy.front.refuseHeld(ctx, p.id); err != nil {
		return err
	}
	if !p.removing {
		return refusal.WithParty(refusal.PartyVolume, p.proxy.front.refuseLost(p.id, p.key))
	}
	if err := p.release(ctx); err != nil {
		return refusal.WithBrokerParty(removalUnfinished(p.target, err))
	}
	return nil
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
		_, found, err := p.proxy.front.find(p.target)
		if found != nil { // the driver called the Runtime API before it failed
			err = p.release(ctx)
		}
		if err == nil {
			err = p.unpublishDevice(ctx)
		}
		if err == nil {
			err = p.unpublishUncertain(ctx)
		}
		return err
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

// release takes the volume from its handler, for which the driver may have staged it.
func (p *publishCall) release(ctx context.Context) error {
	_, err := p.proxy.volumes.Release(ctx, p.target)
	return err
}

func (p *publishCall) unpublishDevice(ctx context.Context) error {
	return p.proxy.stager.UnpublishDevice(ctx, p.id.ID, p.device)
}

// setUncertain records or removes that the driver was asked to publish the volume deferred,
// and that it is not known whether it did.
func (p *publishCall) setUncertain(uncertain bool) error {
	if slices.Contains(p.rec.Uncertain, p.target) == uncertain {
		return nil
	}
	if uncertain {
		p.rec.Uncertain = append(p.rec.Uncertain, p.target)
	} else {
		p.rec.Uncertain = staging.Without(p.rec.Uncertain, p.target)
	}
	return p.proxy.records.Put(p.rec)
}

// unpublishUncertain has the driver unpublish what it may have published deferred.
func (p *publishCall) unpublishUncertain(ctx context.Context) error {
	if p.state.Published != nil || !slices.Contains(p.rec.Uncertain, p.target) {
		return nil
	}
	if err := p.proxy.driver.UnpublishDeferred(ctx, p.id.ID, p.target); err != nil {
		return err
	}
	return p.setUncertain(false)
}
