package front

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// expandVolume grows a deferred volume: the driver its device, the sandbox its
// filesystem. kubelet also calls before there is a sandbox, and then any error
// but FAILED_PRECONDITION keeps the pod from ever starting.
func (n *node) expandVolume(ctx context.Context, raw []byte, forward forwardFunc) ([]byte, error) {
	req := &csi.NodeExpandVolumeRequest{}
	if err := proto.Unmarshal(raw, req); err != nil {
		return nil, unreadable(err)
	}
	found, deferred := n.find(req.GetVolumeId(), req.GetVolumePath(), req.GetStagingTargetPath())
	if !deferred {
		if has := n.lastCapabilities(); has != nil && !has.expand {
			return nil, status.Errorf(codes.Unimplemented, "driver %s grows no volumes on nodes, and the volume is not deferred", n.name)
		}
		return forward(ctx, raw)
	}
	tell(ctx, &found)
	if has := n.lastCapabilities(); found.CSI == nil && (has == nil || !has.native) {
		return forward(ctx, raw) // the driver, which published it through the Runtime API, grows it in the same way
	}
	if err := checkRange(&found, req.GetCapacityRange()); err != nil {
		return nil, err
	}
	end, err := n.turns.take(ctx, n.id(req.GetVolumeId()))
	if err != nil {
		return nil, err
	}
	defer end()
	size, err := n.grow(ctx, req, found.Volume)
	if err != nil {
		return nil, err
	}
	return proto.Marshal(&csi.NodeExpandVolumeResponse{CapacityBytes: size})
}

func checkRange(found *deferral.Status, wish *csi.CapacityRange) error {
	required, limit := wish.GetRequiredBytes(), wish.GetLimitBytes()
	if required < 0 || limit < 0 || (limit > 0 && required > limit) {
		return deferral.Errorf(deferral.Invalid, "volume %s: the capacity range (required %d, limit %d) holds no size",
			found.Target, required, limit)
	}
	return nil
}

func (n *node) grow(ctx context.Context, req *csi.NodeExpandVolumeRequest, v *deferral.Volume) (int64, error) {
	if err := n.growDevice(ctx, req, v); err != nil {
		return 0, err
	}
	size, known := n.cfg.Volumes.DeviceSize(v)
	required := req.GetCapacityRange().GetRequiredBytes()
	if known && size < required {
		return 0, notNow("volume %s: the driver %s has not grown the device %s: it has %d bytes, and %d are wanted; "+
			"look at the driver's log, and whether the volume was grown by its controller", v.Target, n.name, v.Device.Path, size, required)
	}
	if v.ReadOnly {
		return size, nil // nobody can grow a filesystem that nobody may write
	}
	return n.growFilesystem(ctx, req, v, size)
}

// growDevice asks the driver to grow the device, and the device only.
func (n *node) growDevice(ctx context.Context, req *csi.NodeExpandVolumeRequest, v *deferral.Volume) error {
	has, err := n.capabilities(ctx)
	if err != nil {
		return err
	}
	if !has.expand {
		return nil // some devices grow by themselves; its size will tell
	}
	ask, err := n.growRequest(req, v, has)
	if err != nil {
		return err
	}
	if err := n.call(ctx, csi.Node_NodeExpandVolume_FullMethodName, ask, &csi.NodeExpandVolumeResponse{}); err != nil {
		err = n.driverError("asked to grow the device", err, req.GetSecrets())
		if final(err) {
			return notNow("%s", plain(err)) // a pod without its growth is better than no pod
		}
		return err
	}
	return nil
}

func (n *node) growRequest(req *csi.NodeExpandVolumeRequest, v *deferral.Volume, has *capabilities) (*csi.NodeExpandVolumeRequest, error) {
	ask := proto.CloneOf(req)
	if v.CSI != nil && v.CSI.Way == deferral.WayBlock {
		ask.VolumePath, ask.StagingTargetPath = v.CSI.Private, v.CSI.PrivateStaging
		ask.VolumeCapability = asBlock(req.GetVolumeCapability())
		if ask.GetVolumeCapability().GetAccessMode() == nil {
			mode := csi.VolumeCapability_AccessMode_Mode_value[v.CSI.AccessMode]
			ask.VolumeCapability.AccessMode = &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_Mode(mode)}
		}
		return ask, nil
	}
	if !has.native {
		return nil, notNow("volume %s: the driver %s deferred its filesystem and cannot do so any more (was it downgraded?): "+
			"it would grow the filesystem on the host; upgrade it again", v.Target, n.name)
	}
	csidefer.SetRequested(ask)
	return ask, nil
}

// growFilesystem has the sandbox grow the filesystem, now or when it mounts it.
func (n *node) growFilesystem(ctx context.Context, req *csi.NodeExpandVolumeRequest, v *deferral.Volume, size int64) (int64, error) {
	if _, bound := n.cfg.Sandboxes.Binding(v); !bound {
		return n.growLater(ctx, v, size)
	}
	wish := deferral.Range{Required: req.GetCapacityRange().GetRequiredBytes(), Limit: req.GetCapacityRange().GetLimitBytes()}
	grown, err := n.cfg.Sandboxes.Expand(ctx, v, wish)
	switch kind := deferral.KindOf(err); {
	case err == nil:
		return grown, nil
	case kind == deferral.NoSandbox:
		return n.growLater(ctx, v, size)
	case kind == deferral.Unsupported:
		return 0, notNow("%v; its device has been grown to %d bytes", plain(err), size)
	default:
		return 0, err
	}
}

// growLater puts on record that the filesystem is to be grown when it is
// mounted, where the sandbox will do that.
func (n *node) growLater(ctx context.Context, v *deferral.Volume, size int64) (int64, error) {
	if !n.cfg.Volumes.Abilities(v.Handler).GrowsAtMount {
		return 0, notNow("volume %s: its device has been grown to %d bytes, and the sandboxes of handler %s cannot grow the "+
			"filesystem: it keeps its size", v.Target, size, v.Handler)
	}
	if err := n.cfg.Volumes.GrowAtMount(ctx, v.Key, size); err != nil {
		return 0, err
	}
	return size, nil
}
