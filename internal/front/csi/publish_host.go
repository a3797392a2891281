package csi

import (
	"cmp"
	"context"
	"slices"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
)

// publishOnHost lets the driver mount the volume. The target is recorded before: a pod that
// has the volume keeps it from being deferred for another.
func (p *publishCall) publishOnHost(ctx context.Context) ([]byte, error) {
	if err := p.prepareHost(ctx); err != nil {
		return nil, p.proxy.recordRefusal(p.w, &p.verdict, err)
	}
	p.proxy.cfg.Refusals.ForgetTarget(p.target) // it may have been refused, and the policy says otherwise now
	known := slices.Contains(p.rec.OnHost, p.target)
	if !known {
		p.rec.OnHost = append(p.rec.OnHost, p.target)
		p.proxy.stager.RecordOnHost(&p.rec)
	}
	reply, err := p.forward(ctx)
	if notPublished(p.target, known, err) {
		p.rec.OnHost = staging.Without(p.rec.OnHost, p.target)
		p.proxy.stager.RecordOnHost(&p.rec)
	}
	return reply, err
}

// notPublished reports whether the error of a publish on the host leaves no volume at its target: kubelet does not ask
// to unpublish after a final one. If the target was known, an earlier publish may have succeeded, so it has to show
// that nothing is left: the volume would count as the pod's until a restart, and no sandbox could have it.
func notPublished(target string, known bool, err error) bool {
	return err != nil && refusal.IsFinal(err) && (!known || staging.IsUnpublished(target))
}

func (p *publishCall) prepareHost(ctx context.Context) error {
	if err := p.unpublishUncertain(ctx); err != nil {
		return interrupted(p.target, err)
	}
	if err := p.ensureStagedOnHost(ctx); err != nil {
		return err
	}
	return p.proxy.driver.CheckWriting(p.id.ID)
}

// ensureStagedOnHost makes sure that the driver has staged the volume as kubelet asked,
// and that nothing is left of a publish as a device that was interrupted.
func (p *publishCall) ensureStagedOnHost(ctx context.Context) error {
	if p.state.Published == nil {
		if err := p.unpublishDevice(ctx); err != nil {
			return interrupted(p.target, err)
		}
	}
	if p.rec.StagedAsDevice() {
		if mounted, err := staging.MountedOnHost(ctx, p.target); mounted || err != nil {
			return err // if it is mounted, the stage could not show that a pod has it: to unstage it could detach the device
		}
	}
	if p.rec.Stage != nil {
		return p.proxy.stager.Restage(ctx, &p.rec, false, p.verdict.Rule)
	}
	path := p.req.GetStagingTargetPath()
	_, mounted := staging.MountAt(path)
	if asDevice, err := p.proxy.stager.StagedDevice(p.id, path); err != nil || !asDevice || mounted {
		return err
	}
	return stageLost(p.w) // the driver could show the pod the bare directory
}

// publishRaw lets the driver publish a raw block volume. The target is recorded before: its pod may open the device at
// any time, so no sandbox gets it then. The caller holds the volume's lock.
func publishRaw(ctx context.Context, p *driverProxy, id staging.VolumeID, w *decision.VolumeRequest, forward forwardFunc) ([]byte, error) {
	if err := decision.CheckRawDevice(w, p.volumes.OfOrigin(id.Driver, id.ID)); err != nil {
		return nil, err
	}
	if err := cmp.Or(p.front.refuseHeld(ctx, id), p.front.refuseLost(id, ""), p.driver.CheckWriting(id.ID)); err != nil {
		return nil, err
	}
	rec := p.records.Get(id)
	_, known := rec.Raw[w.Path]
	if !known {
		if rec.Raw == nil {
			rec.Raw = make(map[string]bool)
		}
		rec.Raw[w.Path] = w.ReadOnly
		p.stager.RecordOnHost(&rec)
	}
	reply, err := forward(ctx)
	if notPublished(w.Path, known, err) {
		delete(rec.Raw, w.Path)
		p.stager.RecordOnHost(&rec)
	}
	return reply, err
}
