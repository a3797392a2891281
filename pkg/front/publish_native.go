package front

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// native asks the driver to defer, and hands over what it answers.
func (p *publish) native(ctx context.Context, has *capabilities) ([]byte, error) {
	if p.rec.Stage != nil && p.rec.Stage.At != stagedAtPath {
		if err := p.restage(ctx, &p.rec, false, p.verdict.Rule); err != nil {
			return nil, err
		}
	}
	reply := &csi.NodePublishVolumeResponse{}
	if err := p.call(ctx, csi.Node_NodePublishVolume_FullMethodName, p.deferRequest(has), reply); err != nil {
		return nil, p.driverError("asked to publish the volume deferred", err, secretsOf(p.req))
	}
	failpoint.Hit("front-publish-driver")
	if err := p.takeInstruction(ctx, reply, has); err != nil {
		return nil, p.giveBack(ctx, err)
	}
	failpoint.Hit("front-publish-instructed")
	csidefer.StripDeferredMount(reply)
	return proto.Marshal(reply)
}

// deferRequest is kubelet's request with the fields of deferral.
func (p *publish) deferRequest(has *capabilities) *csi.NodePublishVolumeRequest {
	ask := proto.CloneOf(p.req)
	csidefer.SetRequested(ask)
	owner, policy, err := p.group()
	if err != nil || !has.group || owner == "" {
		return ask
	}
	if !has.policy {
		policy = ""
	}
	csidefer.SetGroup(ask.GetVolumeCapability(), owner, string(policy))
	return ask
}

// takeInstruction takes the instruction out of the driver's answer. A driver may
// instead have called the Runtime API meanwhile.
func (p *publish) takeInstruction(ctx context.Context, reply *csi.NodePublishVolumeResponse, has *capabilities) error {
	mount, given, err := csidefer.DeferredMount(reply)
	if err != nil {
		return by(deferral.PartyDriver, deferral.Errorf(deferral.Malformed, "volume %s: what the driver %s answered to be mounted "+
			"cannot be read: %w", p.target, p.name, err))
	}
	if given {
		return p.instruct(ctx, p.nativeInstruction(mount), has)
	}
	_, published, err := p.cfg.Volumes.Find(p.target)
	if err != nil {
		return err
	}
	if !published {
		return by(deferral.PartyDriver, deferral.Errorf(deferral.Unsupported, "volume %s: the driver %s says that it can defer, and "+
			"has neither answered what the sandbox shall mount nor called the Runtime API: this is a fault of the driver; until "+
			"it is mended exclude the volume by a policy rule", p.target, p.name))
	}
	return nil
}

// nativeInstruction is the driver's word, but for what is kubelet's to say: that
// the volume is read-only.
func (p *publish) nativeInstruction(mount *csiv1.DeferredMount) deferral.Instruction {
	flags := &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{
		Mount: &csi.VolumeCapability_MountVolume{MountFlags: mount.GetMountFlags()},
	}}
	in := deferral.Instruction{
		Backing: mount.GetVolumeBackingPath(), FSType: mount.GetFsType(),
		MountFlags: p.mountFlags(flags, p.verdict.Handler, readOnly(p.req)),
		CSI:        &deferral.CSIOrigin{Way: deferral.WayNative},
	}
	switch mount.GetVolumeType().GetType() {
	case runtimev1.VolumeType_BLOCK:
		in.Type = deferral.Block
	case runtimev1.VolumeType_NETWORK:
		in.Type = deferral.Network
	default:
	}
	return in
}

// giveBack undoes a publish that came to nothing.
func (p *publish) giveBack(ctx context.Context, cause error) error {
	if p.before != nil {
		return cause
	}
	ctx, cancel := detached(ctx)
	defer cancel()
	return failed(p.target, cause, p.driverUnpublish(ctx, p.w.id, p.target, true))
}
