package csi

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
)

// unstageVolume asks the driver to unstage the volume, and removes its record.
func unstageVolume(ctx context.Context, p *driverProxy, req *csi.NodeUnstageVolumeRequest, forward forwardFunc) ([]byte, error) {
	stagingPath := req.GetStagingTargetPath()
	return p.withLock(ctx, req.GetVolumeId(), stagingPath, forward, func(id staging.VolumeID) ([]byte, error) {
		if err := p.checkUnstage(id); err != nil {
			return nil, err
		}
		rec := p.records.Get(id)
		if rec.Stage != nil {
			telemetry.CallFrom(ctx).Rule = rec.Stage.Rule
		}
		reply, err := p.askToUnstage(ctx, &rec, stagingPath, forward)
		if err != nil {
			return nil, err
		}
		failpoint.Hit("front-unstage-driver")
		if kubelet.IsRawBlock(stagingPath) { // of another persistent volume: what is known of the filesystem stays
			rec.Raw = nil
			p.stager.RecordOnHost(&rec)
			return reply, nil
		}
		// After a restart a stale record has the driver asked to unstage once more. Most have nothing to do then.
		onHost := !rec.StagedAsDevice() && len(rec.Uncertain) == 0 && !p.driver.TakesDiskAround(stagingPath)
		rec.Stage, rec.OnHost, rec.Uncertain = nil, nil, nil
		if onHost {
			p.stager.RecordOnHost(&rec)
		} else if err := p.records.Put(rec); err != nil {
			return nil, err
		}
		p.front.store.ForgetRequest(id)
		p.cfg.Refusals.ForgetVolume(id.Driver, id.ID)
		return reply, nil
	})
}

// checkUnstage refuses to let the device go away under a pod, a sandbox or mkfs.
func (p *driverProxy) checkUnstage(id staging.VolumeID) error {
	if err := p.driver.CheckWriting(id.ID); err != nil {
		return err
	}
	if published := p.volumes.OfOrigin(id.Driver, id.ID); len(published) > 0 {
		return stillPublished(id, published[0].Target)
	}
	return p.front.refuseLost(id, "")
}

// askToUnstage asks the driver to unstage the volume at the path where it is staged. If the record
// is lost, that is the private path, which derives from the request alone, or kubelet's path. The
// driver is not asked at a path where nothing is staged: some would unstage the disk around it.
func (p *driverProxy) askToUnstage(ctx context.Context, rec *staging.Record, stagingPath string, forward forwardFunc) ([]byte, error) {
	asDevice, err := p.stager.UnstageDevice(ctx, rec.VolumeID, stagingPath)
	if err != nil {
		return nil, err
	}
	_, mounted := staging.MountAt(stagingPath)
	onHost := mounted || !asDevice
	if stage := rec.Stage; stage != nil && stage.Path == stagingPath {
		onHost = stage.At == staging.StagedOnHost
		if !asDevice && rec.StagedAsDevice() && stage.Private != "" { // in an earlier privateDir
			if err := p.stager.Unstage(ctx, rec); err != nil {
				return nil, err
			}
		}
	}
	if onHost && (mounted || !p.driver.TakesDiskAround(stagingPath)) {
		return forward(ctx)
	}
	return proto.Marshal(&csi.NodeUnstageVolumeResponse{})
}
