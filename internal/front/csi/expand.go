package csi

import (
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/ground/rpccode"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// expandVolume grows a deferred volume: the driver its device, the sandbox its filesystem.
func expandVolume(ctx context.Context, p *driverProxy, req *csi.NodeExpandVolumeRequest, forward forwardFunc) ([]byte, error) {
	has := p.driver.LastCapabilities()
	found, err := p.find(ctx, req.GetVolumeId(), req.GetVolumePath(), req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	if found != nil {
		return expandDeferred(ctx, p, req, found, has != nil && has.Native, forward)
	}
	if p.isStagedAsDevice(req.GetVolumeId(), req.GetVolumePath()) {
		return nil, growthOfNoPod(req.GetVolumePath())
	}
	if has != nil && !has.Expand {
		// Without the front kubelet would not ask, and regard it as done.
		return proto.Marshal(&csi.NodeExpandVolumeResponse{CapacityBytes: req.GetCapacityRange().GetRequiredBytes()})
	}
	return forward(ctx)
}

// expandDeferred is expandVolume for a deferred volume. native is whether the driver defers by itself.
func expandDeferred(
	ctx context.Context, p *driverProxy, req *csi.NodeExpandVolumeRequest, found *deferral.Status, native bool, forward forwardFunc,
) ([]byte, error) {
	if found.Removing {
		return nil, beingRemoved(found.Target)
	}
	id := staging.VolumeID{Driver: p.driver.Name, ID: req.GetVolumeId()}
	if found.Origin == nil {
		if asDevice, err := p.private.Published(id, req.GetVolumePath()); asDevice || err != nil {
			return nil, recordUnusable(found.Target)
		}
		if !native {
			return forward(ctx) // the driver published it through the Runtime API, and grows it in the same way
		}
	}
	if err := checkRange(found.Target, req.GetCapacityRange()); err != nil {
		return nil, err
	}
	return p.withLock(ctx, req.GetVolumeId(), found.Target, forward, func(staging.VolumeID) ([]byte, error) {
		// It may have been released meanwhile, and another one published.
		if now, known := p.volumes.Get(found.Key); !known || now.Removing || !now.Created.Equal(found.Created) {
			return nil, beingRemoved(found.Target)
		}
		call := &expandCall{cfg: p.cfg, driver: p.driver, volumes: p.volumes, log: p.log, req: req, v: found.Volume}
		size, err := call.run(ctx)
		if err != nil {
			return nil, namingPod(found.Volume, repeated(err))
		}
		telemetry.CallFrom(ctx).Detail = fmt.Sprintf("to %d bytes", size)
		// The device of an encrypted volume is smaller than the volume, which includes the header.
		return proto.Marshal(&csi.NodeExpandVolumeResponse{CapacityBytes: max(size, req.GetCapacityRange().GetRequiredBytes())})
	})
}

// expandCall grows one deferred volume. Its caller holds the volume's lock.
type expandCall struct {
	cfg     *Config
	driver  *staging.Driver
	volumes Volumes
	log     *zap.Logger
	req     *csi.NodeExpandVolumeRequest
	v       *volume.Volume
}

func (e *expandCall) run(ctx context.Context) (int64, error) {
	refused := e.growDevice(ctx)
	size, known := e.volumes.DeviceSize(e.v)
	required := e.req.GetCapacityRange().GetRequiredBytes()
	if size < required && size+e.cfg.Disks.HeaderSize(e.v) >= required {
		required = size // the rest is the header
	}
	if refused != nil && (!known || required == 0 || size < required || ctx.Err() != nil) {
		return 0, refused
	}
	if refused != nil { // some drivers grow the device, and fail at something else
		e.log.Warn(grownDespiteError, zap.String(telemetry.FieldTarget, e.v.Target), zap.Int64("size", size), zap.Error(refused))
	}
	if !known {
		return 0, e.notGrown(ctx, sizeUnknown(e.v))
	}
	if size < required {
		return 0, e.notGrown(ctx, deviceNotGrown(e.v, e.driver.Name, size, required))
	}
	if e.v.ReadOnly {
		return size, nil // nobody can grow a filesystem that nobody may write
	}
	return e.growFilesystem(ctx, size)
}

// growDevice asks the driver to grow the device, and the device only.
func (e *expandCall) growDevice(ctx context.Context) error {
	has, err := e.driver.Capabilities(ctx)
	if err != nil || !has.Expand {
		return err // some devices grow by themselves; the size will show it
	}
	ask, err := e.deviceRequest(has)
	if err != nil {
		return e.notGrown(ctx, err)
	}
	_, err = e.driver.Node.NodeExpandVolume(ctx, ask)
	err = e.driver.Error("asked to grow the device", err, e.req.GetSecrets())
	if err != nil && refusal.IsFinal(err) {
		return e.notGrown(ctx, err)
	}
	return err
}

// notGrown is the error of a device that has not grown. kubelet also calls before there is a sandbox, and then any code but
// FAILED_PRECONDITION keeps the pod from starting. After that code it never asks again, so a pod that runs gets another one.
func (e *expandCall) notGrown(ctx context.Context, err error) error {
	if e.cfg.Sandboxes.MayRun(ctx, e.v) {
		return err
	}
	return failedPrecondition("%s", refusal.Plain(err)) // a pod without its growth is better than no pod
}

// repeated is an error after which kubelet asks again. From 1.34 on it takes three codes of a driver or a sandbox for
// "never": it marks the claim as infeasible.
func repeated(err error) error {
	switch status.Code(rpccode.Status(err)) {
	case codes.InvalidArgument, codes.OutOfRange, codes.NotFound:
		return refusal.WithParty(refusal.PartyOf(err), volume.Errorf(volume.Busy, "%w", refusal.Plain(err)))
	default:
		return err
	}
}

func (e *expandCall) deviceRequest(has *staging.Capabilities) (*csi.NodeExpandVolumeRequest, error) {
	ask := proto.CloneOf(e.req)
	if origin := e.v.Origin; origin != nil && origin.Way == volume.WayBlock {
		ask.VolumePath, ask.StagingTargetPath = origin.Private, origin.PrivateStaging
		ask.VolumeCapability = staging.AsBlock(e.req.GetVolumeCapability())
		if ask.GetVolumeCapability().GetAccessMode() == nil {
			mode := csi.VolumeCapability_AccessMode_Mode_value[origin.AccessMode]
			ask.VolumeCapability.AccessMode = &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_Mode(mode)}
		}
		return ask, nil
	}
	if !has.Native {
		return nil, volume.Errorf(volume.Busy, "%w", refusal.Plain(cannotDeferAnyMore(e.v.Target, e.driver.Name)))
	}
	csidefer.SetRequested(ask)
	return ask, nil
}

// growFilesystem has the sandbox grow the filesystem, now or when it mounts it.
func (e *expandCall) growFilesystem(ctx context.Context, size int64) (int64, error) {
	growsAtMount := e.volumes.Abilities(e.v.Handler).GrowsAtMount
	if !growsAtMount && e.cfg.Disks.FillsDevice(e.v, size) {
		return size, nil // it was grown on this node before it was handed over
	}
	// Always asked: which sandbox has the volume may not be known yet, as after a restart.
	wanted := volume.Range{Required: min(e.req.GetCapacityRange().GetRequiredBytes(), size), Limit: e.req.GetCapacityRange().GetLimitBytes()}
	grown, err := e.cfg.Sandboxes.Expand(ctx, e.v, wanted)
	why := ""
	switch volume.KindOf(err) {
	case volume.NoSandbox:
		if growsAtMount {
			err := e.volumes.GrowAtMount(ctx, e.v.Key, size)
			if kind := volume.KindOf(err); err != nil && kind != volume.Exhausted && kind != volume.Internal {
				return 0, err
			}
			e.warnUnrecorded(err) // the next mount grows it all the same
			return size, nil
		}
		why = sandboxCannotGrow(e.v)
	case volume.Unsupported:
		why = refusal.Plain(err).Error()
	default:
		return grown, err
	}
	// No sandbox grows it now. The size is recorded, so that people see what is pending.
	if e.v.GrowTo != size && !growsAtMount {
		e.warnUnrecorded(e.volumes.GrowAtMount(ctx, e.v.Key, size))
	}
	return 0, failedPrecondition("%s; its device has been grown to %d bytes: %s", why, size, refusal.GrowsWhen(e.v))
}

func (e *expandCall) warnUnrecorded(err error) {
	if err != nil {
		e.log.Warn("a pending growth cannot be recorded", zap.String(telemetry.FieldTarget, e.v.Target), zap.Error(err))
	}
}
