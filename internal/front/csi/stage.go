package csi

import (
	"cmp"
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// stageCall is one NodeStageVolume of a filesystem volume. Its caller holds the volume's
// lock.
type stageCall struct {
	proxy   *driverProxy
	req     *csi.NodeStageVolumeRequest
	w       *decision.VolumeRequest
	rec     staging.Record
	pod     *decision.Pod // one of those that use the volume, where they are known
	verdict policy.Verdict
	forward forwardFunc
}

func (s *stageCall) run(ctx context.Context) (reply []byte, err error) {
	err = s.proxy.front.refuseHeld(ctx, s.proxy.driver.ID(s.w.VolumeID))
	var asDevice bool
	if err == nil {
		asDevice, err = s.decide(ctx)
	}
	if err == nil {
		err = s.undoOtherStaging(ctx, asDevice)
	}
	if err != nil {
		return nil, s.refuse(s.notBegun(err))
	}
	err = s.proxy.stager.Stage(ctx, &s.rec, s.req, asDevice, s.verdict.Rule, func(ctx context.Context) (err error) {
		reply, err = s.forward(ctx)
		return err
	})
	if err != nil && s.rec.Stage != nil && s.rec.Stage.At == staging.NotStaged {
		err = s.removeRecord(err)
	}
	if err != nil && !asDevice {
		return reply, err // the driver's own error on a volume that is not deferred
	}
	return reply, s.refuse(err)
}

// decide sets the verdict, and reports whether the driver has to stage the volume as a device.
func (s *stageCall) decide(ctx context.Context) (asDevice bool, err error) {
	var kept bool
	state := s.state()
	if s.verdict, asDevice, kept = decision.KeptAtStage(state); kept {
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

// checkBlockWay refuses a volume that the driver cannot give as a block device.
func (p *driverProxy) checkBlockWay(w *decision.VolumeRequest, verdict *policy.Verdict) error {
	if err := decision.CheckBlockWay(w, verdict); err != nil {
		return err
	}
	return p.stager.CheckRawBlock(verdict.Rule)
}

// state returns what the node has of the volume. It does not touch the staging path of a
// volume that is known to be published: the server of a mount there may have gone.
func (s *stageCall) state() *decision.State {
	state := &decision.State{Elsewhere: s.proxy.front.cfg.Volumes.OfOrigin(s.w.Driver, s.w.VolumeID), OnHost: s.rec.OnHost}
	if s.rec.Stage != nil {
		state.Staged = &decision.Staged{AsDevice: s.rec.Stage.At == staging.StagedAsDevice, Rule: s.rec.Stage.Rule}
	} else if len(state.Elsewhere) == 0 {
		state.PathOnHost = staging.IsMountPoint(s.w.Path)
	}
	return state
}

// applyPolicy decides by the pods that use the volume, where a cluster is asked.
func (s *stageCall) applyPolicy(ctx context.Context) (err error) {
	rules, lookup := s.proxy.front.rules(), s.proxy.front.cfg.Pods
	if lookup == nil {
		s.verdict, err = rules.Stage(s.w)
		return err
	}
	pods, err := lookup.Using(ctx, s.w.Driver, s.w.VolumeID)
	if err != nil {
		return refusal.WithParty(volume.PartyPods, err)
	}
	s.verdict, s.pod, err = rules.StageForPods(s.w, pods)
	return err
}

// undoOtherStaging unstages the volume if it is staged as a filesystem and a device is
// needed now, or the reverse. Without a record, a sandbox may have the device all the same,
// and the driver must not mount it on the host.
func (s *stageCall) undoOtherStaging(ctx context.Context, asDevice bool) error {
	staged := s.rec.Stage
	stagedOtherwise := staged != nil && staged.Path == s.w.Path && staged.StagedOtherwise(asDevice)
	if stagedOtherwise || staged == nil && !asDevice {
		if err := s.proxy.front.refuseLost(s.proxy.driver.ID(s.w.VolumeID), ""); err != nil {
			return err
		}
	}
	if !stagedOtherwise {
		return nil
	}
	return s.proxy.stager.Unstage(ctx, &s.rec)
}

// notBegun is the error of a call that did not ask the driver to stage the volume, which stays
// as an earlier call has left it.
func (s *stageCall) notBegun(cause error) error {
	switch {
	case !refusal.IsFinal(cause):
		return cause
	case s.rec.Stage == nil:
		return cmp.Or(s.proxy.front.refuseLost(s.proxy.driver.ID(s.w.VolumeID), ""), cause)
	case s.rec.Stage.At == staging.NotStaged:
		return s.removeRecord(cause)
	default:
		return refusal.NotFinal(refusal.Clip(s.rec.ID), cause)
	}
}

// removeRecord removes the stage from the record of a volume that is not staged: after the
// error of this call kubelet does not ask to unstage it.
func (s *stageCall) removeRecord(cause error) error {
	s.rec.Stage = nil
	return refusal.JoinUndo(refusal.Clip(s.rec.ID), cause, s.proxy.front.store.Records.Put(s.rec))
}

func (s *stageCall) refuse(err error) error {
	return s.proxy.recordRefusal(s.proxy.refusalDraft(s.w, &s.verdict, s.pod), err)
}

// unstage asks the driver to unstage the volume, and removes its record.
func (p *driverProxy) unstage(ctx context.Context, id staging.VolumeID, stagingPath string, forward forwardFunc) ([]byte, error) {
	if published := p.front.cfg.Volumes.OfOrigin(id.Driver, id.ID); len(published) > 0 {
		return nil, stillPublished(id, published[0].Target) // the device must not go away under a pod
	}
	if err := p.front.refuseLost(id, ""); err != nil {
		return nil, err
	}
	rec := p.front.store.Records.Get(id)
	reply, err := p.askToUnstage(ctx, &rec, stagingPath, forward)
	if err != nil {
		return nil, err
	}
	failpoint.Hit("front-unstage-driver")
	if kubelet.IsRawBlock(stagingPath) { // of another persistent volume: what is known of the filesystem stays
		rec.Raw = nil
		return reply, p.front.store.Records.Put(rec)
	}
	rec.Stage, rec.OnHost, rec.Uncertain = nil, nil, nil
	if err := p.front.store.Records.Put(rec); err != nil {
		return nil, err
	}
	p.front.store.ForgetRequest(id)
	name := refusal.Clip(id.ID)
	p.front.refused.Forget(func(r *volume.Refusal) bool { return r.Driver == id.Driver && r.VolumeID == name })
	return reply, nil
}

// askToUnstage asks the driver to unstage the volume at the path where it is staged. If the record
// is lost, that is the private path, which derives from the request alone, or kubelet's path. The
// driver is not asked at a path where nothing is staged: some would unstage the disk around it.
func (p *driverProxy) askToUnstage(ctx context.Context, rec *staging.Record, stagingPath string, forward forwardFunc) ([]byte, error) {
	asDevice, err := p.stager.UnstageDevice(ctx, rec.ID, stagingPath)
	if err != nil {
		return nil, err
	}
	mounted := staging.IsMountPoint(stagingPath)
	onHost := mounted || !asDevice
	if stage := rec.Stage; stage != nil && stage.Path == stagingPath {
		onHost = stage.At == staging.StagedOnHost
		if !asDevice && stage.At == staging.StagedAsDevice && stage.Private != "" { // in an earlier privateDir
			err = p.stager.Unstage(ctx, rec)
		}
	}
	if err == nil && onHost && (mounted || !p.driver.TakesDiskAround(stagingPath)) {
		return forward(ctx)
	}
	if err != nil {
		return nil, err
	}
	return proto.Marshal(&csi.NodeUnstageVolumeResponse{})
}
