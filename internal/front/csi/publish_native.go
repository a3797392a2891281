package csi

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// nativePublish asks a driver that can defer to do so, and hands over what it answers.
type nativePublish struct {
	call *publishCall
	has  *staging.Capabilities
}

func (n *nativePublish) run(ctx context.Context) ([]byte, error) {
	p, driver := n.call, n.call.proxy.driver
	if err := p.ensureStagedOnHost(ctx); err != nil {
		return nil, err
	}
	begun := slices.Contains(p.rec.Uncertain, p.target)
	if err := p.setUncertain(p.state.Published == nil); err != nil {
		return nil, err
	}
	failpoint.Hit("front-publish-asked")
	reply, err := driver.Node.NodePublishVolume(ctx, n.request())
	if err != nil {
		err = driver.Error("asked to publish the volume deferred", err, staging.SecretsOf(p.req))
		if begun || !refusal.IsFinal(err) {
			return nil, err
		}
		return nil, refusal.JoinUndo(p.target, err, p.setUncertain(false))
	}
	failpoint.Hit("front-publish-driver")
	if err := n.handOver(ctx, reply); err != nil {
		return nil, p.undo(ctx, err, p.unpublishUncertain)
	}
	failpoint.Hit("front-publish-instructed")
	if err := p.setUncertain(false); err != nil {
		p.proxy.stager.LogRecordFailure(err) // the broker has a record of the volume, and an unpublish corrects this one
	}
	csidefer.StripDeferredMount(reply)
	return proto.Marshal(reply)
}

// request is kubelet's request with the fields of deferral.
func (n *nativePublish) request() *csi.NodePublishVolumeRequest {
	ask := proto.CloneOf(n.call.req)
	csidefer.SetRequested(ask)
	group, change := n.call.group()
	if !n.has.Group || group == "" {
		return ask
	}
	if !n.has.Policy {
		change = ""
	}
	csidefer.SetGroup(ask.GetVolumeCapability(), group, string(change))
	return ask
}

// handOver hands over the instruction in the driver's answer. The driver may instead have
// called the Runtime API meanwhile. Only kubelet decides whether the volume is read-only, also
// by the mount option ro, which a driver may drop.
func (n *nativePublish) handOver(ctx context.Context, reply *csi.NodePublishVolumeResponse) error {
	p := n.call
	mount, given, err := csidefer.DeferredMount(reply)
	if err != nil {
		return badInstruction(p.w, err)
	}
	if !given {
		_, found, err := p.proxy.front.find(p.target)
		if err != nil {
			return err
		}
		if found == nil {
			return noInstruction(p.w)
		}
		if want := p.verdict.Handler; want != "" && found.Handler != want {
			return p.undo(ctx, wrongHandler(p.w, found.Handler, want), p.release)
		}
		_, err = p.mark(found.ReadOnly) // no sandbox starts before this call has ended
		return err
	}
	asked := p.w.Capability.GetMount()
	readOnly := p.w.ReadOnly || slices.Contains(mountopt.Split(asked.GetMountFlags()), "ro")
	in := volume.Instruction{
		Backing: mount.GetVolumeBackingPath(), FSType: mount.GetFsType(), MountFlags: mount.GetMountFlags(),
		Format: volume.FormatDriver, Origin: &volume.Origin{Way: volume.WayNative},
	}
	switch mount.GetVolumeType().GetType() {
	case runtimev1.VolumeType_BLOCK:
		in.Type = volume.Block
	case runtimev1.VolumeType_NETWORK:
		in.Type = volume.Network
	default:
	}
	return p.handOver(ctx, in, readOnly, n.has)
}
