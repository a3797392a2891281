package csi

import (
	"cmp"
	"context"
	"path"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// unpublishCall is one NodeUnpublishVolume. Its caller holds the volume's lock.
type unpublishCall struct {
	proxy   *driverProxy
	id      staging.VolumeID
	target  string
	rec     staging.Record
	forward forwardFunc
	// device is the private path, and asDevice is set where the driver was asked for a device there.
	device   string
	asDevice bool
}

// unpublishVolume undoes a publish in the opposite order: the sandbox has to be gone, then the volume
// is released from its handler, then the driver unpublishes its device. Where the record
// was lost, the private path shows what was published.
func unpublishVolume(ctx context.Context, p *driverProxy, req *csi.NodeUnpublishVolumeRequest, forward forwardFunc) ([]byte, error) {
	target := req.GetTargetPath()
	return p.withLock(ctx, req.GetVolumeId(), target, forward, func(id staging.VolumeID) ([]byte, error) {
		if err := p.driver.CheckWriting(id.ID); err != nil {
			return nil, err
		}
		device := p.private.Publish(id, target)
		asDevice, err := p.private.Exists(path.Dir(device))
		if err != nil {
			return nil, err
		}
		u := &unpublishCall{proxy: p, id: id, target: target, rec: p.records.Get(id), forward: forward, device: device, asDevice: asDevice}
		released, err := u.release(ctx)
		if err != nil {
			return nil, namingPod(released, refusal.WithAdvice(err))
		}
		failpoint.Hit("front-unpublish-unstaged")
		reply, err := u.askDriver(ctx, released)
		if err != nil {
			return nil, namingPod(released, err)
		}
		failpoint.Hit("front-unpublish-driver")
		p.cfg.Refusals.ForgetTarget(target)
		u.forgetTarget()
		return reply, nil
	})
}

// release takes a deferred volume, or what is left of one whose record was lost, from its handler. It does not touch a
// target that the driver is known to have mounted: its server may have gone, and the call would hang.
func (u *unpublishCall) release(ctx context.Context) (*volume.Volume, error) {
	if slices.Contains(u.rec.OnHost, u.target) {
		return nil, nil //nolint:nilnil // there is none, which is no failure
	}
	key, found, err := u.proxy.front.find(u.target)
	if u.asDevice { // also when the broker has released it already, or it cannot be looked up
		telemetry.CallFrom(ctx).Volume = string(cmp.Or(key, volume.KeyOf(u.target)))
	}
	if err != nil {
		return nil, err
	}
	if found != nil {
		if err := decision.CheckSameVolume(found.Volume, u.id.Driver, u.id.ID); err != nil {
			return nil, err
		}
		annotate(ctx, found)
		u.recordDeferred(found)
		u.proxy.markReleased(found.Volume)
	}
	released, err := u.proxy.volumes.Release(ctx, u.target)
	if released == nil && volume.KindOf(err) == volume.Invalid {
		return nil, nil //nolint:nilnil // a target that lies elsewhere is no deferred one
	}
	return released, err
}

// recordDeferred notes what the driver itself deferred before the broker forgets it: if the driver fails to unpublish,
// the repeated call asks it in the same way.
func (u *unpublishCall) recordDeferred(found *deferral.Status) {
	deferred := found.Origin == nil && !u.asDevice || found.Origin != nil && found.Origin.Way == volume.WayNative
	if deferred && !slices.Contains(u.rec.Uncertain, u.target) {
		u.rec.Uncertain = append(u.rec.Uncertain, u.target)
		u.proxy.stager.RecordOnHost(&u.rec)
	}
}

// askDriver has the driver unpublish what it published: at the private path, at kubelet's own,
// or at both if it is not known which.
func (u *unpublishCall) askDriver(ctx context.Context, released *volume.Volume) ([]byte, error) {
	if err := u.proxy.stager.UnpublishDevice(ctx, u.id.ID, u.device); err != nil {
		return nil, err
	}
	switch {
	case slices.Contains(u.rec.Uncertain, u.target):
		if err := u.proxy.driver.UnpublishDeferred(ctx, u.id.ID, u.target); err != nil {
			return nil, err
		}
	case released != nil && u.asDevice:
	case (u.asDevice || u.neverHad(released)) && u.proxy.private.RemoveEmptyTarget(u.target):
	default:
		return u.forward(ctx)
	}
	return proto.Marshal(&csi.NodeUnpublishVolumeResponse{})
}

// neverHad reports whether the pod never had the volume, which sandboxes of others have as a device: a driver that goes
// by the volume's id would take that from them. While they have it, it is published in no other way, except as a raw
// device that is only read. That is on record, or shows at the target, as does what was published before the front came.
func (u *unpublishCall) neverHad(released *volume.Volume) bool {
	asDevice := func(other deferral.Status) bool { return other.Origin.Way == volume.WayBlock }
	return released == nil && !u.onRecord() && staging.IsUnpublished(u.target) &&
		slices.ContainsFunc(u.proxy.volumes.OfOrigin(u.id.Driver, u.id.ID), asDevice)
}

// onRecord reports whether the target is in the record of the volume.
func (u *unpublishCall) onRecord() bool {
	_, raw := u.rec.Raw[u.target]
	return raw || slices.Contains(u.rec.OnHost, u.target) || slices.Contains(u.rec.Uncertain, u.target)
}

// forgetTarget removes the target from the record of the volume. The driver has unpublished it: a record that cannot be
// written does not keep the pod from ending, and a restart drops targets whose directories have gone.
func (u *unpublishCall) forgetTarget() {
	if !u.onRecord() {
		return
	}
	delete(u.rec.Raw, u.target)
	u.rec.OnHost, u.rec.Uncertain = staging.Without(u.rec.OnHost, u.target), staging.Without(u.rec.Uncertain, u.target)
	u.proxy.stager.RecordOnHost(&u.rec)
}
