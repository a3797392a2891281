package daemon

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/ondisk"
	"github.com/crust-proxy/crust-proxy/internal/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// What was read is used for as long; while a growth is on record, which is rare, less so.
const (
	diskAge   = time.Minute
	growthAge = 5 * time.Second
)

// disks reads what filesystems have on record on their devices.
type disks struct {
	reader  *ondisk.Reader
	metrics *telemetry.Metrics
	log     *zap.Logger
}

// matches tells whether a filesystem of this size can be the one on a volume's
// device. Its size changes rarely, so that an old look will do.
func (d *disks) matches(ctx context.Context, v *volume.Volume, bytes, inodes int64) (is, known bool) {
	super := d.reader.Super(ctx, v, diskAge)
	if super == nil {
		return false, false
	}
	return super.Is(bytes, inodes), true
}

// fillsDevice tells whether the filesystem of a volume is known to be as large as its
// device. It reads the size anew: a growth is asked for once.
func (d *disks) fillsDevice(ctx context.Context, v *volume.Volume, device int64) bool {
	super := d.reader.Super(ctx, v, 0)
	return super != nil && super.Fills(device)
}

// hasGrown tells whether the growth that is on record for a volume is known to be done.
func (d *disks) hasGrown(ctx context.Context, v *volume.Volume) bool {
	super := d.reader.Super(ctx, v, growthAge)
	return super != nil && super.Fills(v.GrowTo)
}

// condition is what a filesystem has on record of itself. Without errors
// nothing is known: they may have been met and not be written down.
func (d *disks) condition(ctx context.Context, v *volume.Volume) *volume.Condition {
	super := d.reader.Super(ctx, v, diskAge)
	if super == nil || super.Errors == nil {
		return nil
	}
	return &volume.Condition{Abnormal: true, Message: super.Errors.Words(), Reason: abi.ReasonErrors}
}

// lacksGroup tells whether the root directory of a volume is not known to be writable
// for the volume's group.
func (d *disks) lacksGroup(ctx context.Context, v *volume.Volume) bool {
	super := d.reader.Super(ctx, v, diskAge)
	return super == nil || super.Root == nil || !super.Root.WritableFor(v.Group)
}

// leaving looks at a filesystem once more that its sandbox has unmounted: what the
// kernel of a guest met is written down by then.
func (d *disks) leaving(ctx context.Context, v *volume.Volume) {
	super := d.reader.Super(ctx, v, 0)
	if super == nil || super.Errors == nil {
		return
	}
	d.log.Warn("a volume is given back with errors on record", zap.String("volume", v.Target),
		zap.String("device", v.Device.Path), zap.String("csiDriver", v.Driver), zap.String("condition", super.Errors.Words()))
	d.metrics.LeftWithErrors(v.Driver, v.Handler)
}
