package staging

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/ground/redact"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
)

// Driver makes the front's own calls to a driver.
type Driver struct {
	Name string
	Node csi.NodeClient
	// writing returns an error while a program of this node writes to a volume's device.
	writing func(driver, volumeID string) error

	known  atomic.Pointer[Capabilities]
	silent atomic.Pointer[time.Time] // when a call of Within took too long, until the driver reports capabilities
}

// NewDriver makes a client of a driver. Writing returns an error while a program of this
// node writes to the device of a volume.
func NewDriver(name string, conn grpc.ClientConnInterface, writing func(driver, volumeID string) error) *Driver {
	return &Driver{Name: name, Node: csi.NewNodeClient(conn), writing: writing}
}

// CheckWriting returns an error while a program of this node writes to the device of a volume. The driver is not asked
// to unpublish or unstage it then, nor to publish it for the host: it could detach the device, or mount it.
func (d *Driver) CheckWriting(volumeID string) error {
	if err := d.writing(d.Name, volumeID); err != nil {
		return stillWritten(VolumeID{d.Name, volumeID}, err)
	}
	return nil
}

const askAgain = time.Minute // how long a driver that took too long is not asked

// Silent reports whether Within does not ask the driver.
func (d *Driver) Silent() bool {
	since := d.silent.Load()
	return since != nil && time.Since(*since) < askAgain
}

// Within makes a call that may take so long. After one that took longer it returns an error at once for a minute:
// kubelet asks for the health of all volumes one after the other, and would wait for this driver once per volume.
func Within[Reply any](ctx context.Context, d *Driver, limit time.Duration, call func(context.Context) (Reply, error)) (reply Reply, err error) {
	if d.Silent() {
		return reply, status.Error(codes.DeadlineExceeded, "the driver did not answer a call in time, and is not asked for a minute")
	}
	began := time.Now()
	waiting, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	reply, err = call(waiting)
	late := waiting.Err() != nil
	if status.Code(err) == codes.DeadlineExceeded { // gRPC tells the driver the deadline, and it may notice it first
		late = late || time.Since(began) >= limit-limit/atDeadline
	}
	if err != nil && late && ctx.Err() == nil {
		d.silent.Store(new(time.Now()))
	}
	return reply, err
}

// atDeadline is the part of its time in which a driver's DEADLINE_EXCEEDED is that of the call, and not its own.
const atDeadline = 10

// Error adds the driver and what it was asked for to its error, if there is one, and keeps the code and details. It
// removes secrets of the request that the driver repeats: errors end in events and logs.
func (d *Driver) Error(doing string, err error, secrets map[string]string) error {
	if err == nil {
		return nil
	}
	out := status.Convert(err).Proto()
	out.Message = fmt.Sprintf("driver %s, %s: %s", d.Name, doing, refusal.OneLine(redact.Secrets(out.GetMessage(), secrets)))
	if len(secrets) > 0 {
		out.Details = nil // nobody reads them, and they may hold a secret in any encoding
	}
	return refusal.WithParty(refusal.PartyDriver, status.FromProto(out).Err())
}

// BlockError is the error of a driver that was asked for a device, with what to do where the driver cannot give one.
func (d *Driver) BlockError(step, rule string, err error, secrets map[string]string) error {
	doing := "asked to " + step + " the volume as a block device"
	switch status.Code(err) {
	case codes.InvalidArgument, codes.Unimplemented, codes.FailedPrecondition:
		doing += noBlockAdvice(rule)
	default:
	}
	return d.Error(doing, err, secrets)
}

// Unstage has the driver unstage a volume at a path.
func (d *Driver) Unstage(ctx context.Context, volumeID, path string) error {
	if err := d.CheckWriting(volumeID); err != nil {
		return err
	}
	_, err := d.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: volumeID, StagingTargetPath: path})
	return d.Error("asked to unstage the volume", err, nil)
}

// UnpublishDeferred has a driver that deferred by itself unpublish a volume, with defer_fs_ops
// unless it was downgraded.
func (d *Driver) UnpublishDeferred(ctx context.Context, volumeID, path string) error {
	has, err := d.Capabilities(ctx)
	if err != nil {
		return err
	}
	return d.unpublish(ctx, volumeID, path, has.Native)
}

func (d *Driver) unpublish(ctx context.Context, volumeID, path string, deferred bool) error {
	if err := d.CheckWriting(volumeID); err != nil {
		return err
	}
	req := &csi.NodeUnpublishVolumeRequest{VolumeId: volumeID, TargetPath: path}
	if deferred {
		csidefer.SetRequested(req)
	}
	_, err := d.Node.NodeUnpublishVolume(ctx, req)
	return d.Error("asked to unpublish the volume", err, nil)
}

// maxLayers bounds how often the driver is asked in one call.
const maxLayers = 100

// unpublishLayers has the driver unpublish a device, and repeats that while the driver
// removes one mount of several: a driver that made one mount for each repeated publish
// fails, or answers OK, once for each, and kubelet would wait longer after every time.
func (d *Driver) unpublishLayers(ctx context.Context, volumeID, device string) error {
	for range maxLayers {
		before, _ := MountAt(device)
		err := d.unpublish(ctx, volumeID, device, false)
		if after, mounted := MountAt(device); !mounted || after.Mnt_id == before.Mnt_id || ctx.Err() != nil {
			return err
		}
	}
	return tooManyLayers(d.Name, device)
}

// AsBlock is the capability to ask for a device in place of a mount.
func AsBlock(capability *csi.VolumeCapability) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
		AccessMode: capability.GetAccessMode(),
	}
}

// undoTimeout bounds the roll-back of a call.
const undoTimeout = 30 * time.Second

// UndoContext is the context of a roll-back. It goes on when the caller has gone.
func UndoContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
}
