package csifront

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/csifront/refusal"
	"github.com/crust-proxy/crust-proxy/internal/csifront/staging"
	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// unstage has the driver unstage the volume. Where the record was lost both places are
// tried: the private path derives from the request alone.
func (p *driverProxy) unstage(ctx context.Context, req *csi.NodeUnstageVolumeRequest, forward forwardFunc) ([]byte, error) {
	id := p.driver.ID(req.GetVolumeId())
	if published := p.front.cfg.Volumes.OfOrigin(id.Driver, id.ID); len(published) > 0 {
		return nil, stillPublished(id, published[0].Target) // the device must not go away under a pod
	}
	rec := p.front.store.Records.Get(id)
	asDevice, err := p.stager.UnstageDevice(ctx, id.ID, req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	var reply []byte
	if asDevice && rec.Stage != nil && rec.Stage.At == staging.StagedAsDevice {
		reply, err = proto.Marshal(&csi.NodeUnstageVolumeResponse{})
	} else {
		reply, err = forward(ctx)
	}
	if err != nil {
		return nil, err
	}
	failpoint.Hit("front-unstage-driver")
	rec.Stage, rec.OnHost, rec.Uncertain = nil, nil, nil
	if err := p.front.store.Records.Put(rec); err != nil {
		return nil, err
	}
	p.front.store.ForgetRequest(id)
	name := refusal.Clip(id.ID)
	p.front.refused.Forget(func(r *volume.Refusal) bool { return r.Driver == id.Driver && r.VolumeID == name })
	return reply, nil
}
