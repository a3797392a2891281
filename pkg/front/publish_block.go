package front

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// block has the driver publish a device at a private path and hands that over.
func (p *publish) block(ctx context.Context, has *capabilities) ([]byte, error) {
	if err := p.checkBlockWay(p.w, p.verdict, p.target); err != nil {
		return nil, err
	}
	if err := p.stagedAsBlock(ctx, has); err != nil {
		return nil, err
	}
	device := p.private.publish(p.w.id, p.target)
	if err := p.private.makeDir(dirOf(device)); err != nil {
		return nil, err
	}
	failpoint.Hit("front-publish-made")
	if err := p.driverPublish(ctx, device, has); err != nil {
		return nil, p.notPublished(device, err)
	}
	failpoint.Hit("front-publish-driver")
	if err := p.instruct(ctx, p.blockInstruction(device, has), has); err != nil {
		return nil, p.takeBack(ctx, device, err)
	}
	failpoint.Hit("front-publish-instructed")
	return proto.Marshal(&csi.NodePublishVolumeResponse{})
}

// stagedAsBlock sees to it that the driver staged a device.
func (p *publish) stagedAsBlock(ctx context.Context, has *capabilities) error {
	switch {
	case !has.stage, p.before != nil, len(p.living) > 0:
		return nil
	case p.req.GetStagingTargetPath() == "":
		return p.noInline(p.verdict, p.target) // kubelet stages all others, and not every driver is told that it is one
	case p.rec.Stage == nil && p.private.exists(p.private.staging(p.w.id, p.req.GetStagingTargetPath())):
		return nil // staged privately, and the record was lost
	case p.rec.Stage == nil:
		return deferral.Errorf(deferral.InUse, "volume %s: it is to be deferred (%s), and was staged before crust-proxy stood "+
			"in front of the driver %s: delete every pod on this node that uses the volume, so that kubelet stages it anew",
			p.target, p.verdict.Rule, p.name)
	case p.rec.Stage.At == stagedPrivately:
		return nil
	default:
		return p.restage(ctx, &p.rec, true, p.verdict.Rule)
	}
}

func (p *publish) driverPublish(ctx context.Context, device string, has *capabilities) error {
	ask := proto.CloneOf(p.req)
	csidefer.ClearRequested(ask)
	ask.TargetPath = device
	ask.VolumeCapability = asBlock(p.req.GetVolumeCapability())
	if has.stage {
		ask.StagingTargetPath = p.private.staging(p.w.id, p.req.GetStagingTargetPath())
	}
	err := p.call(ctx, csi.Node_NodePublishVolume_FullMethodName, ask, &csi.NodePublishVolumeResponse{})
	if err != nil {
		return p.refusedBlock("publish", p.verdict.Rule, err, secretsOf(p.req))
	}
	return nil
}

func (p *publish) blockInstruction(device string, has *capabilities) deferral.Instruction {
	in := deferral.Instruction{
		Type: deferral.Block, Backing: device, FSType: p.fsType(p.w),
		MountFlags: p.mountFlags(p.req.GetVolumeCapability(), p.verdict.Handler, readOnly(p.req)),
		Format:     p.verdict.Format, CSI: &deferral.CSIOrigin{Way: deferral.WayBlock, Private: device},
	}
	if has.stage {
		in.CSI.PrivateStaging = p.private.staging(p.w.id, p.req.GetStagingTargetPath())
	}
	return in
}

// notPublished clears what was made for a publish that the driver refused for
// good. A volume that a sandbox has already is left as it is.
func (p *publish) notPublished(device string, cause error) error {
	if p.before != nil || !final(cause) {
		return cause
	}
	return failed(p.target, cause, p.private.removePublish(device))
}

// takeBack undoes the driver's publish when the volume could not be handed over.
func (p *publish) takeBack(ctx context.Context, device string, cause error) error {
	if p.before != nil {
		return cause
	}
	ctx, cancel := detached(ctx)
	defer cancel()
	if err := p.driverUnpublish(ctx, p.w.id, device, false); err != nil {
		return failed(p.target, cause, err)
	}
	return failed(p.target, cause, p.private.removePublish(device))
}
