package csi

import (
	"context"
	"path"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// blockPublish has a driver that cannot defer publish a device at a private path, and hands the device over.
type blockPublish struct {
	call *publishCall
	has  *staging.Capabilities
	// staging is the private path at which the driver has staged the device, or "".
	staging string
}

func (b *blockPublish) run(ctx context.Context) ([]byte, error) {
	p, private := b.call, b.call.proxy.private
	if p.state.Published == nil { // else a pod has the device already, whatever the driver has done since
		if err := p.proxy.checkBlockWay(p.w, &p.verdict); err != nil {
			return nil, err
		}
	}
	if err := p.unpublishUncertain(ctx); err != nil {
		return nil, interrupted(p.target, err)
	}
	if err := b.ensureStaged(ctx); err != nil {
		return nil, err
	}
	if b.has.Stage {
		b.staging = private.Staging(p.id, p.req.GetStagingTargetPath())
	}
	if ignored := decision.IgnoredParameters(p.w.Context); len(ignored) > 0 && p.state.Published == nil && len(p.verdict.MakeFS.Options) == 0 {
		p.proxy.log.Warn(parametersIgnored, zap.String("target", p.target), zap.Strings("parameters", ignored), zap.String("rule", p.verdict.Rule))
	}
	if err := b.publishDevice(ctx); err != nil {
		return nil, err
	}
	in := volume.Instruction{
		Type: volume.Block, Backing: p.device, FSType: p.w.FSType, MountFlags: p.w.Capability.GetMount().GetMountFlags(),
		Format: p.verdict.Format, MakeFS: p.verdict.MakeFS, KeepSize: p.verdict.KeepSize,
		Origin: &volume.Origin{Way: volume.WayBlock, Private: p.device, PrivateStaging: b.staging},
	}
	if err := p.handOver(ctx, in, p.w.ReadOnly, b.has); err != nil {
		return nil, p.undo(ctx, err, p.unpublishDevice)
	}
	failpoint.Hit("front-publish-instructed")
	return proto.Marshal(&csi.NodePublishVolumeResponse{})
}

// publishDevice has the driver publish the device. If that of an earlier publish is still there, the driver is not
// asked again: kubelet repeats its publish after each restart, and some drivers add one more bind mount each time.
func (b *blockPublish) publishDevice(ctx context.Context) error {
	p, private := b.call, b.call.proxy.private
	begun, err := private.Exists(path.Dir(p.device))
	if err != nil {
		return err
	}
	if err := private.MakeDir(path.Dir(p.device)); err != nil {
		return err
	}
	failpoint.Hit("front-publish-made")
	if published := p.state.Published; published != nil && private.Shows(p.device, published.Device) {
		return nil
	}
	if err := b.askDriver(ctx); err != nil {
		if begun || !refusal.IsFinal(err) {
			return err // what an earlier call has begun is for finishError
		}
		return refusal.JoinUndo(p.target, err, private.RemovePublish(p.device))
	}
	failpoint.Hit("front-publish-driver")
	if err := p.proxy.stager.CheckPublished(p.device, p.verdict.Rule); err != nil {
		return p.undo(ctx, err, p.unpublishDevice)
	}
	return nil
}

func (b *blockPublish) ensureStaged(ctx context.Context) error {
	p, path := b.call, b.call.req.GetStagingTargetPath()
	switch {
	case !b.has.Stage, p.state.Published != nil, len(p.state.Elsewhere) > 0:
		return nil
	case path == "":
		// kubelet stages all other volumes.
		return decision.InlineAsDevice(p.w, &p.verdict)
	case p.rec.Stage != nil:
		return p.proxy.stager.Restage(ctx, &p.rec, true, p.verdict.Rule)
	}
	if staged, err := p.proxy.stager.StagedDevice(p.id, path); err != nil || staged {
		return err
	}
	return stagedBeforeFront(p.w, &p.verdict)
}

// askDriver asks for a device that can be written, also for a volume that is only read: some
// drivers refuse readonly for a device, or make the device read-only for ever. The broker makes
// it read-only while the volume is published. The access mode stays.
func (b *blockPublish) askDriver(ctx context.Context) error {
	p, driver := b.call, b.call.proxy.driver
	ask := proto.CloneOf(p.req)
	csidefer.ClearRequested(ask)
	ask.TargetPath, ask.VolumeCapability, ask.Readonly = p.device, staging.AsBlock(p.w.Capability), false
	if b.has.Stage {
		ask.StagingTargetPath = b.staging
	}
	if _, err := driver.Node.NodePublishVolume(ctx, ask); err != nil {
		return driver.BlockError("publish", p.verdict.Rule, err, staging.SecretsOf(p.req))
	}
	return nil
}
