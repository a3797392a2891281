package front

import (
	"cmp"
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// refusal is what is known of a volume, should it be refused.
func (n *node) refusal(w wanted, verdict deferral.Verdict) deferral.Refusal {
	return deferral.Refusal{
		Driver: n.name, VolumeID: clip(w.id.id), FSType: clip(n.fsType(w)), AccessMode: w.mode().String(),
		Rule: verdict.Rule, Handler: n.handler(verdict),
	}
}

// handler is the runtime handler that shall have a volume, or "".
func (n *node) handler(verdict deferral.Verdict) string {
	if !verdict.Defer {
		return ""
	}
	return cmp.Or(verdict.Handler, n.cfg.DefaultHandler)
}

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
	s := &stage{node: n, req: req, w: w, rec: n.records.get(w.id)}
	block, err := s.howToStage(ctx)
	if err == nil {
		n.memory.remember(w.id, req)
		err = s.away(ctx, block)
	}
	if err != nil {
		return nil, n.tell(s.refusal(), err)
	}
	var reply []byte
	err = n.place(ctx, &s.rec, req, block, s.verdict.Rule, func(ctx context.Context) (err error) {
		reply, err = forward(ctx, raw)
		return err
	})
	if err != nil && !block {
		return reply, err // the driver's own word on a volume that is none of ours
	}
	return reply, n.tell(s.refusal(), err)
}

// stage is one NodeStageVolume of a filesystem volume. Its caller has the volume's
// turn.
type stage struct {
	*node
	req     *csi.NodeStageVolumeRequest
	w       wanted
	rec     volumeRecord
	pod     *Pod // one of those that want the volume, where they are known
	verdict deferral.Verdict
}

// away has the driver unstage what it staged in the other way.
func (s *stage) away(ctx context.Context, block bool) error {
	staged := s.rec.Stage
	if staged == nil || staged.Path != s.req.GetStagingTargetPath() || staged.At == notStaged || staged.At == stagedAt(block) {
		return nil
	}
	return s.unplace(ctx, &s.rec)
}

func (s *stage) refusal() deferral.Refusal {
	out := s.node.refusal(s.w, s.verdict)
	out.Target = s.req.GetStagingTargetPath()
	if s.pod != nil {
		out.PodUID = s.pod.UID
		out.PodNamespace, out.PodName = podNames(s.pod, s.w)
	}
	return out
}

func unreadable(err error) error {
	return deferral.Errorf(deferral.Invalid, "the request cannot be read: %w", err)
}

// howToStage tells whether the driver is to stage a device only. While a pod has
// the volume it stays as it is: kubelet repeats the stage after its restart.
func (s *stage) howToStage(ctx context.Context) (block bool, err error) {
	where := s.req.GetStagingTargetPath()
	if living := s.cfg.Volumes.OfCSI(s.name, s.w.id.id); len(living) > 0 {
		s.verdict = verdictOf(&living[0])
		return living[0].CSI.Way == deferral.WayBlock, nil
	}
	if len(s.rec.Plain) > 0 && s.rec.Stage != nil {
		s.verdict.Rule = s.rec.Stage.Rule
		return s.rec.Stage.At == stagedPrivately, nil
	}
	if _, mounted := mountOf(where); mounted && s.rec.Stage == nil {
		s.verdict.Rule = heldOnHost
		return false, nil
	}
	if err := s.decide(ctx); err != nil || !s.verdict.Defer {
		return false, err
	}
	has, err := s.capabilities(ctx)
	if err != nil || has.native {
		return false, err // a driver that can defer does so at the publish
	}
	if err := s.checkDeferrable(s.w, s.verdict, where, slices.Contains(readerOnly, s.w.mode())); err != nil {
		return false, err
	}
	return true, s.checkBlockWay(s.w, s.verdict, where)
}

// decide decides for a stage, which names no pod: by the pods of this node that
// want the volume. Where they want it in several ways the first of them decides
// here, and each publish for itself. One that will be refused decides nothing.
func (s *stage) decide(ctx context.Context) (err error) {
	if s.cfg.Pods == nil {
		s.verdict, err = s.node.decide(s.w, false, nil)
		return err
	}
	pods, err := s.cfg.Pods.Using(ctx, s.name, s.w.id.id)
	if err == nil && len(pods) == 0 {
		err = deferral.Errorf(deferral.Busy, "no pod of this node is known yet to want the volume %s of driver %s: the cluster is asked "+
			"again", clip(s.w.id.id), s.name)
	}
	if err != nil {
		return by(deferral.PartyPods, err)
	}
	var first error
	for i := range pods {
		verdict, err := s.decideFor(&pods[i])
		if first == nil && err != nil {
			first, s.pod, s.verdict = err, &pods[i], verdict
		}
		if err == nil {
			s.pod, s.verdict = &pods[i], verdict
			return nil
		}
	}
	return first
}

func (s *stage) decideFor(pod *Pod) (deferral.Verdict, error) {
	wants, err := pod.forVolume(s.w.id, "")
	if err != nil {
		return deferral.Verdict{}, err
	}
	return s.node.decide(s.w, false, wants)
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
		err = n.refusedBlock("stage", rule, err, secretsOf(req))
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
			return n.driverError("asked to stage the volume", err, secretsOf(req))
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
