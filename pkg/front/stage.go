package front

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// stageVolume decides, and has the driver stage a filesystem or only a device.
func (n *node) stageVolume(ctx context.Context, raw []byte, forward forwardFunc) ([]byte, error) {
	req := &csi.NodeStageVolumeRequest{}
	if err := proto.Unmarshal(raw, req); err != nil {
		return nil, unreadable(err)
	}
	if req.GetVolumeCapability().GetMount() == nil || req.GetVolumeId() == "" || req.GetStagingTargetPath() == "" {
		return forward(ctx, raw) // raw block volumes have no filesystem, and bad requests are the driver's to refuse
	}
	w := n.wantedBy(req)
	end, err := n.turns.take(ctx, w.id)
	if err != nil {
		return nil, err
	}
	defer end()
	rec := n.records.get(w.id)
	block, rule, err := n.howToStage(ctx, w, &rec, req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	n.memory.remember(w.id, req)
	if rec.Stage != nil && rec.Stage.Path == req.GetStagingTargetPath() && rec.Stage.At != notStaged && rec.Stage.At != stagedAt(block) {
		if err := n.unplace(ctx, &rec); err != nil {
			return nil, err
		}
	}
	var reply []byte
	err = n.place(ctx, &rec, req, block, rule, func(ctx context.Context) (err error) {
		reply, err = forward(ctx, raw)
		return err
	})
	return reply, err
}

func unreadable(err error) error {
	return deferral.Errorf(deferral.Invalid, "the request cannot be read: %w", err)
}

// howToStage tells whether the driver is to stage a device only. While a pod has
// the volume it stays as it is: kubelet repeats the stage after its restart.
func (n *node) howToStage(ctx context.Context, w wanted, rec *volumeRecord, where string) (block bool, rule string, err error) {
	if living := n.cfg.Volumes.OfCSI(n.name, w.id.id); len(living) > 0 {
		origin := living[0].CSI
		return origin.Way == deferral.WayBlock, origin.Rule, nil
	}
	if len(rec.Plain) > 0 && rec.Stage != nil {
		return rec.Stage.At == stagedPrivately, rec.Stage.Rule, nil
	}
	if _, mounted := mountOf(where); mounted && rec.Stage == nil {
		return false, heldOnHost, nil
	}
	verdict, err := n.decideStage(ctx, w)
	if err != nil || !verdict.Defer {
		return false, verdict.Rule, err
	}
	has, err := n.capabilities(ctx)
	if err != nil || has.native {
		return false, verdict.Rule, err // a driver that can defer does so at the publish
	}
	if err := n.checkDeferrable(w, verdict, where, slices.Contains(readerOnly, w.mode())); err != nil {
		return false, verdict.Rule, err
	}
	return true, verdict.Rule, n.checkBlockWay(w, verdict, where)
}

// place has the driver stage the volume, as a device at a private path or as
// kubelet asked. The record is written first: killed after that, the same call
// or an unstage finds what was begun. AsAsked stages as kubelet asked.
func (n *node) place(
	ctx context.Context, rec *volumeRecord, req *csi.NodeStageVolumeRequest, block bool, rule string,
	asAsked func(context.Context) error,
) error {
	before, stage := rec.Stage, asAsked
	rec.Stage = newStage(req, rule)
	rec.Stage.At = stagedAt(block)
	if block {
		ask := n.blockStage(req, rec.Stage)
		stage = func(ctx context.Context) error { return n.driverStage(ctx, ask) }
		if err := n.private.makeDir(rec.Stage.Private); err != nil {
			rec.Stage = before
			return err
		}
	}
	if err := n.putStage(rec, block); err != nil {
		return err
	}
	failpoint.Hit("front-stage-recorded")
	err := stage(ctx)
	failpoint.Hit("front-stage-driver")
	if err == nil {
		return nil
	}
	if block {
		err = n.refusedBlock("stage", rule, err, req.GetSecrets())
	}
	if before == nil || before.At == notStaged {
		return n.notPlaced(rec, before, err)
	}
	return err
}

func (n *node) driverStage(ctx context.Context, req *csi.NodeStageVolumeRequest) error {
	return n.call(ctx, csi.Node_NodeStageVolume_FullMethodName, req, &csi.NodeStageVolumeResponse{})
}

// refusedBlock is what a driver said when it was asked for a device, with what to
// do where it cannot give one.
func (n *node) refusedBlock(step, rule string, err error, secrets map[string]string) error {
	doing := "asked to " + step + " the volume as a block device"
	switch status.Code(err) {
	case codes.InvalidArgument, codes.Unimplemented, codes.FailedPrecondition:
		doing += " (it is to be deferred by " + rule + "; where driver or volume have no block access, create the volume " +
			"with volumeMode Block, or exclude it by a policy rule)"
	default:
	}
	return n.driverError(doing, err, secrets)
}

// putStage records a stage. A volume that is not deferred is not kept from its
// pod by a full run directory.
func (n *node) putStage(rec *volumeRecord, block bool) error {
	err := n.records.put(*rec)
	if err != nil && !block {
		n.complain(err)
		return nil
	}
	return err
}

// blockStage is the request for a device in place of a filesystem.
func (n *node) blockStage(req *csi.NodeStageVolumeRequest, stage *stageRecord) *csi.NodeStageVolumeRequest {
	stage.Private = n.private.staging(n.id(req.GetVolumeId()), req.GetStagingTargetPath())
	ask := proto.CloneOf(req)
	ask.StagingTargetPath = stage.Private
	ask.VolumeCapability = asBlock(req.GetVolumeCapability())
	return ask
}

// notPlaced forgets a stage that the driver refused for good. After any other
// error it may have been done, and is remembered to be undone.
func (n *node) notPlaced(rec *volumeRecord, before *stageRecord, cause error) error {
	if !final(cause) {
		return cause
	}
	private := rec.Stage.Private
	rec.Stage = before
	if err := n.records.put(*rec); err != nil {
		return failed(rec.ID, cause, err)
	}
	if private != "" {
		return failed(rec.ID, cause, n.private.removeStaging(private))
	}
	return cause
}

// unplace has the driver unstage what it staged, wherever that was.
func (n *node) unplace(ctx context.Context, rec *volumeRecord) error {
	where := rec.Stage.Path
	if rec.Stage.At == stagedPrivately {
		where = rec.Stage.Private
	}
	if err := n.driverUnstage(ctx, rec.ID, where); err != nil {
		return err
	}
	rec.Stage.At = notStaged
	if err := n.records.put(*rec); err != nil {
		return err
	}
	failpoint.Hit("front-unplaced")
	if rec.Stage.Private != "" {
		return n.private.removeStaging(rec.Stage.Private)
	}
	return nil
}

func (n *node) driverUnstage(ctx context.Context, volume, where string) error {
	req := &csi.NodeUnstageVolumeRequest{VolumeId: volume, StagingTargetPath: where}
	if err := n.call(ctx, csi.Node_NodeUnstageVolume_FullMethodName, req, &csi.NodeUnstageVolumeResponse{}); err != nil {
		return n.driverError("asked to unstage the volume", err, nil)
	}
	return nil
}

// restage moves a volume that no pod has from one way of staging to the other:
// the verdict has changed, and kubelet does not stage again by itself.
func (n *node) restage(ctx context.Context, rec *volumeRecord, block bool, rule string) error {
	req, err := n.rememberedStage(rec)
	if err != nil {
		return err
	}
	if rec.Stage.At != notStaged {
		if err := n.unplace(ctx, rec); err != nil {
			return err
		}
	}
	return n.place(ctx, rec, req, block, rule, func(ctx context.Context) error {
		if err := n.driverStage(ctx, req); err != nil {
			return n.driverError("asked to stage the volume", err, req.GetSecrets())
		}
		return nil
	})
}

// rememberedStage is kubelet's stage request, from memory or from the record.
func (n *node) rememberedStage(rec *volumeRecord) (*csi.NodeStageVolumeRequest, error) {
	if req := n.memory.get(n.id(rec.ID)); req != nil {
		return req, nil
	}
	if rec.Stage.Incomplete {
		return nil, deferral.Errorf(deferral.InUse, "volume %s of driver %s: it has to be staged in another way (the policy's "+
			"verdict changed), and its secrets are not known since crust-proxy was restarted, for they are kept in memory only: "+
			"delete every pod on this node that uses the volume, so that kubelet stages it anew", clip(rec.ID), n.name)
	}
	req := &csi.NodeStageVolumeRequest{}
	if err := proto.Unmarshal(rec.Stage.Request, req); err != nil {
		return nil, deferral.Errorf(deferral.Internal, "volume %s: the remembered stage cannot be read: %w", clip(rec.ID), err)
	}
	return req, nil
}
