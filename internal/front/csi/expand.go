package csi

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// expandCall is one NodeExpandVolume of a deferred volume. Its caller holds the volume's
// lock.
type expandCall struct {
	proxy *driverProxy
	req   *csi.NodeExpandVolumeRequest
	v     *volume.Volume
}

func (e *expandCall) run(ctx context.Context) (int64, error) {
	refused := e.growDevice(ctx)
	size, known := e.proxy.front.cfg.Volumes.DeviceSize(e.v)
	required := e.req.GetCapacityRange().GetRequiredBytes()
	if refused != nil && (!known || required == 0 || size < required || ctx.Err() != nil) {
		return 0, refused
	}
	if refused != nil { // some drivers grow the device, and fail at something else
		e.proxy.log.Warn(grownDespiteError, zap.String(telemetry.FieldTarget, e.v.Target), zap.Int64("size", size), zap.Error(refused))
	}
	if !known {
		return 0, sizeUnknown(e.v)
	}
	if size < required {
		return 0, deviceNotGrown(e.v, e.proxy.driver.Name, size, required)
	}
	if e.v.ReadOnly {
		return size, nil // nobody can grow a filesystem that nobody may write
	}
	return e.growFilesystem(ctx, size)
}

// growDevice asks the driver to grow the device, and the device only.
func (e *expandCall) growDevice(ctx context.Context) error {
	driver := e.proxy.driver
	has, err := driver.Capabilities(ctx)
	if err != nil {
		return err
	}
	if !has.Expand {
		return nil // some devices grow by themselves; the size will show it
	}
	ask, err := e.deviceRequest(has)
	if err != nil {
		return err
	}
	_, err = driver.Node.NodeExpandVolume(ctx, ask)
	err = driver.Error("asked to grow the device", err, e.req.GetSecrets())
	if err != nil && refusal.IsFinal(err) {
		return failedPrecondition("%s", refusal.Plain(err)) // a pod without its growth is better than no pod
	}
	return err
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
		return nil, cannotDeferAnyMore(e.v.Target, e.proxy.driver.Name)
	}
	csidefer.SetRequested(ask)
	return ask, nil
}

// growFilesystem has the sandbox grow the filesystem, now or when it mounts it.
func (e *expandCall) growFilesystem(ctx context.Context, size int64) (int64, error) {
	if !e.growsAtMount() && e.proxy.front.cfg.FillsDevice(ctx, e.v, size) {
		return size, nil // it was grown on this node before it was handed over
	}
	// Always asked: which sandbox has the volume may not be known yet, as after a restart.
	wanted := volume.Range{Required: e.req.GetCapacityRange().GetRequiredBytes(), Limit: e.req.GetCapacityRange().GetLimitBytes()}
	grown, err := e.proxy.front.cfg.Sandboxes.Expand(ctx, e.v, wanted)
	switch kind := volume.KindOf(err); {
	case err == nil:
		return grown, nil
	case kind == volume.NoSandbox:
		return e.growLater(ctx, size)
	case kind == volume.Unsupported:
		return 0, e.growthPending(ctx, size, refusal.Plain(err).Error())
	default:
		return 0, err
	}
}

func (e *expandCall) growsAtMount() bool {
	return e.proxy.front.cfg.Volumes.Abilities(e.v.Handler).GrowsAtMount
}

// growLater records that the filesystem is to be grown when it is mounted, where the
// sandbox will do that.
func (e *expandCall) growLater(ctx context.Context, size int64) (int64, error) {
	if !e.growsAtMount() {
		return 0, e.growthPending(ctx, size, sandboxCannotGrow(e.v))
	}
	if err := e.proxy.front.cfg.Volumes.GrowAtMount(ctx, e.v.Key, size); err != nil {
		return 0, err
	}
	return size, nil
}

// growthPending is the answer where no sandbox of the handler grows the filesystem. It records
// the size, so that people see what is pending.
func (e *expandCall) growthPending(ctx context.Context, size int64, why string) error {
	if e.v.GrowTo != size && !e.growsAtMount() {
		if err := e.proxy.front.cfg.Volumes.GrowAtMount(ctx, e.v.Key, size); err != nil {
			e.proxy.log.Warn("a pending growth cannot be recorded", zap.String(telemetry.FieldTarget, e.v.Target), zap.Error(err))
		}
	}
	return failedPrecondition("%s; its device has been grown to %d bytes: %s", why, size, volume.GrowsWhen(e.v))
}
