package csi

import (
	"cmp"
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
)

// stageCall is one NodeStageVolume of a filesystem volume. Its caller holds the volume's lock.
type stageCall struct {
	proxy   *driverProxy
	rules   *decision.Rules
	id      staging.VolumeID
	req     *csi.NodeStageVolumeRequest
	w       *decision.VolumeRequest
	rec     staging.Record
	state   decision.State
	verdict policy.Verdict
}

// stageVolume decides, and has the driver stage a filesystem or only a device.
func stageVolume(ctx context.Context, p *driverProxy, req *csi.NodeStageVolumeRequest, forward forwardFunc) ([]byte, error) {
	if req.GetVolumeCapability().GetMount() == nil {
		return forward(ctx) // a raw block volume has no filesystem
	}
	return p.withLock(ctx, req.GetVolumeId(), req.GetStagingTargetPath(), forward, func(id staging.VolumeID) ([]byte, error) {
		s := &stageCall{proxy: p, rules: p.front.rules.Load(), id: id, req: req, rec: p.records.Get(id)}
		s.w = decision.StageRequest(p.driver.Name, p.cfg.DefaultFSType, req)
		s.w.Mark = p.marks.Get(id)
		reply, err := s.run(ctx, forward)
		if err != nil && s.rec.Stage == nil {
			p.front.store.ForgetRequest(id) // kubelet does not ask to unstage it
		}
		return reply, err
	})
}

func (s *stageCall) run(ctx context.Context, forward forwardFunc) ([]byte, error) {
	var asDevice bool
	err := s.proxy.front.refuseHeld(ctx, s.id)
	if err == nil {
		asDevice, err = s.decide(ctx)
	}
	if err == nil {
		err = s.undoOtherStaging(ctx, asDevice)
	}
	annotateVerdict(ctx, s.w, &s.verdict)
	telemetry.CallFrom(ctx).Repeated = s.rec.Stage.Done(asDevice)
	if err != nil {
		return nil, s.proxy.recordRefusal(s.w, &s.verdict, s.notBegun(err))
	}
	if s.state.PathOnHost {
		// A pod may have it. Without a record no later call has the driver unstage it but kubelet's.
		return forward(ctx)
	}
	reply, err := s.proxy.stager.Stage(ctx, &s.rec, s.req, asDevice, s.verdict.Rule, forward)
	if err != nil && s.rec.Stage != nil && s.rec.Stage.At == staging.NotStaged {
		err = s.removeRecord(err)
	}
	if err != nil && !asDevice {
		return reply, err // the driver's own error on a volume that is not deferred
	}
	return reply, s.proxy.recordRefusal(s.w, &s.verdict, err)
}

// decide sets the verdict, and reports whether the driver has to stage the volume as a device.
func (s *stageCall) decide(ctx context.Context) (asDevice bool, err error) {
	var kept bool
	state := &s.state
	state.Elsewhere, state.OnHost = s.proxy.volumes.OfOrigin(s.id.Driver, s.id.ID), s.rec.OnHost
	if s.rec.Stage != nil {
		state.Staged = &decision.Staged{AsDevice: s.rec.StagedAsDevice(), Rule: s.rec.Stage.Rule}
	} else if len(state.Elsewhere) == 0 { // else the server of a mount at the staging path may have gone
		_, mounted := staging.MountAt(s.w.Path)
		state.PathOnHost = mounted || len(state.OnHost) > 0
	}
	if s.verdict, asDevice, kept = s.rules.KeptAtStage(state); kept {
		if len(state.Elsewhere) > 0 {
			s.rec.AssumeStaged(s.w.Path, asDevice)
		}
		return asDevice, nil
	}
	if err := s.applyPolicy(ctx); err != nil || !s.verdict.Defer {
		return false, err
	}
	has, err := s.proxy.driver.Capabilities(ctx)
	if err != nil || has.Native {
		return false, err // a driver that can defer does so at the publish
	}
	if err := decision.CheckDeferrable(s.w, &s.verdict); err != nil {
		return false, err
	}
	return true, s.proxy.checkBlockWay(s.w, &s.verdict)
}

// applyPolicy decides by the pods that use the volume, where a cluster is asked.
func (s *stageCall) applyPolicy(ctx context.Context) (err error) {
	lookup := s.proxy.cfg.Pods
	if lookup == nil {
		s.verdict, err = s.rules.Stage(s.w, nil)
		return err
	}
	pods, err := lookup.Using(ctx, s.id.Driver, s.id.ID)
	if err != nil {
		return refusal.WithParty(refusal.PartyPods, err)
	}
	s.verdict, err = s.rules.StageForPods(s.w, pods)
	return err
}

// undoOtherStaging unstages the volume if it is staged as a filesystem and a device is needed now, or the reverse.
// Without a record, a sandbox may have the device all the same, and the driver must not mount it on the host. If none
// has, a device may be staged since before a reboot: asked later to unstage that, under the filesystem, a driver that
// goes by the volume's id alone would fail, or take the disk away.
func (s *stageCall) undoOtherStaging(ctx context.Context, asDevice bool) error {
	staged := s.rec.Stage
	stagedOtherwise := staged != nil && staged.Path == s.w.Path && staged.StagedOtherwise(asDevice)
	if !stagedOtherwise && (staged != nil || asDevice) {
		return nil
	}
	if err := s.proxy.front.refuseLost(s.id, ""); err != nil || s.state.PathOnHost || !stagedOtherwise && len(s.rec.Raw) > 0 {
		return err
	}
	if stagedOtherwise {
		return s.proxy.stager.Unstage(ctx, &s.rec)
	}
	_, err := s.proxy.stager.UnstageDevice(ctx, s.id, s.w.Path)
	return err
}

// notBegun is the error of a call that did not ask the driver to stage the volume, which stays
// as an earlier call has left it.
func (s *stageCall) notBegun(cause error) error {
	switch {
	case !refusal.IsFinal(cause):
		return cause
	case s.rec.Stage == nil:
		return cmp.Or(s.proxy.front.refuseLost(s.id, ""), cause)
	case s.rec.Stage.At == staging.NotStaged:
		return s.removeRecord(cause)
	default:
		return refusal.NotFinal(refusal.Clip(s.id.ID), cause)
	}
}

// removeRecord removes the stage from the record of a volume that is not staged: after the
// error of this call kubelet does not ask to unstage it.
func (s *stageCall) removeRecord(cause error) error {
	s.rec.Stage = nil
	return refusal.JoinUndo(refusal.Clip(s.id.ID), cause, s.proxy.records.Put(s.rec))
}
