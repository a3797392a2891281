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

// blockPublish has a driver that cannot defer publish a device at a private path, and
// hands the device over.
type blockPublish struct {
	call   *publishCall
	has    *staging.Capabilities
	device string
}

func (b *blockPublish) run(ctx context.Context) ([]byte, error) {
	p := b.call
	if err := p.proxy.checkBlockWay(p.w, &p.verdict); err != nil {
		return nil, err
	}
	if err := p.unpublishUncertain(ctx); err != nil {
		return nil, interrupted(p.target, err)
	}
	if err := b.ensureStaged(ctx); err != nil {
		return nil, err
	}
	b.logIgnoredParameters()
	private := p.proxy.front.store.Private
	begun, err := private.Exists(path.Dir(b.device))
	if err != nil {
		return nil, err
	}
	if err := private.MakeDir(path.Dir(b.device)); err != nil {
		return nil, err
	}
	failpoint.Hit("front-publish-made")
	if !b.stillPublished() {
		if err := b.askDriver(ctx); err != nil {
			if begun || !refusal.IsFinal(err) {
				return nil, err // what an earlier call has begun is for finishError
			}
			return nil, refusal.JoinUndo(p.target, err, private.RemovePublish(b.device))
		}
		failpoint.Hit("front-publish-driver")
		if err := p.proxy.stager.CheckPublished(b.device, p.verdict.Rule); err != nil {
			return nil, p.undo(ctx, err, p.unpublishDevice)
		}
	}
	if err := p.handOver(ctx, b.instruction(), b.has); err != nil {
		return nil, p.undo(ctx, err, p.unpublishDevice)
	}
	failpoint.Hit("front-publish-instructed")
	return proto.Marshal(&csi.NodePublishVolumeResponse{})
}

func (b *blockPublish) ensureStaged(ctx context.Context) error {
	p, path := b.call, b.call.req.GetStagingTargetPath()
	switch {
	case !b.has.Stage, p.state.Published != nil, len(p.state.Elsewhere) > 0:
		return nil
	case path == "":
		// kubelet stages all other volumes. It does not name inline volumes as such to every driver.
		return decision.InlineAsDevice(p.w, &p.verdict)
	case p.rec.Stage == nil:
		return b.checkStagedUnrecorded()
	case p.rec.Stage.Done(true):
		return nil
	default:
		return p.proxy.stager.Restage(ctx, &p.rec, true, p.verdict.Rule)
	}
}

// checkStagedUnrecorded refuses a volume without a record that is not staged privately.
func (b *blockPublish) checkStagedUnrecorded() error {
	staged, err := b.call.proxy.stager.StagedDevice(b.call.w.VolumeID, b.call.req.GetStagingTargetPath())
	if err == nil && !staged {
		err = stagedBeforeFront(b.call.w, &b.call.verdict)
	}
	return err
}

func (b *blockPublish) stagingPath() string {
	p := b.call
	return p.proxy.front.store.Private.Staging(p.proxy.driver.ID(p.w.VolumeID), p.req.GetStagingTargetPath())
}

// logIgnoredParameters logs which parameters of the StorageClass have no effect, unless the
// publish is a repeated one or the rule replaces them.
func (b *blockPublish) logIgnoredParameters() {
	p := b.call
	if p.state.Published != nil || len(p.verdict.MakeFS.Options) > 0 {
		return
	}
	if ignored := decision.IgnoredParameters(p.w.Context); len(ignored) > 0 {
		p.proxy.log.Warn(parametersIgnored, zap.String("volume", p.target), zap.Strings("parameters", ignored),
			zap.String("rule", p.verdict.Rule))
	}
}

// stillPublished reports whether the device of an earlier publish is still at the private path.
// Then the driver is not asked again: kubelet repeats its publish after each restart, and some
// drivers add one more bind mount each time.
func (b *blockPublish) stillPublished() bool {
	published := b.call.state.Published
	return published != nil && b.call.proxy.front.store.Private.Shows(b.device, published.Device)
}

// askDriver asks for a device that can be written, also for a volume that is only read: some
// drivers refuse readonly for a device, or make the device read-only for ever. The broker makes
// it read-only while the volume is published. The access mode stays.
func (b *blockPublish) askDriver(ctx context.Context) error {
	p := b.call
	ask := proto.CloneOf(p.req)
	csidefer.ClearRequested(ask)
	ask.TargetPath = b.device
	ask.VolumeCapability = staging.AsBlock(p.w.Capability)
	if b.has.Stage {
		ask.StagingTargetPath = b.stagingPath()
	}
	ask.Readonly = false
	if _, err := p.proxy.driver.Node.NodePublishVolume(ctx, ask); err != nil {
		return p.proxy.driver.BlockError("publish", p.verdict.Rule, err, staging.SecretsOf(p.req))
	}
	return nil
}

func (b *blockPublish) instruction() volume.Instruction {
	p := b.call
	in := volume.Instruction{
		Type: volume.Block, Backing: b.device, FSType: p.w.FSType,
		MountFlags: p.mountFlags(p.w.Capability.GetMount().GetMountFlags(), p.w.ReadOnly),
		Format:     p.verdict.Format, MakeFS: p.verdict.MakeFS, KeepSize: p.verdict.KeepSize,
		Origin: &volume.Origin{Way: volume.WayBlock, Private: b.device},
	}
	if b.has.Stage {
		in.Origin.PrivateStaging = b.stagingPath()
	}
	return in
}
