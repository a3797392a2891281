package front

import (
	"context"
	"path"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

func dirOf(device string) string { return path.Dir(device) }

// unpublishVolume undoes a publish in the opposite order: first the sandbox has
// to be gone, then the volume is taken back from its handler, then the driver
// takes its device. What a lost record does not tell, the private path does.
func (n *node) unpublishVolume(ctx context.Context, raw []byte, forward forwardFunc) ([]byte, error) {
	req := &csi.NodeUnpublishVolumeRequest{}
	if err := proto.Unmarshal(raw, req); err != nil {
		return nil, unreadable(err)
	}
	if req.GetVolumeId() == "" || req.GetTargetPath() == "" {
		return forward(ctx, raw)
	}
	id := n.id(req.GetVolumeId())
	end, err := n.turns.take(ctx, id)
	if err != nil {
		return nil, err
	}
	defer end()
	gone, err := n.takeBackVolume(ctx, id, req.GetTargetPath())
	if err != nil {
		return nil, err
	}
	failpoint.Hit("front-unpublish-unstaged")
	reply, err := n.unpublishFromDriver(ctx, id, req, gone, func(ctx context.Context) ([]byte, error) { return forward(ctx, raw) })
	if err != nil {
		return nil, err
	}
	failpoint.Hit("front-unpublish-driver")
	n.forgetTarget(req.GetTargetPath())
	return reply, n.forgetPlain(id, req.GetTargetPath())
}

// takeBackVolume takes a deferred volume, or what is left of one whose record was
// lost, from its handler. A target that the driver is known to have mounted is not
// looked at: its server may have gone, and whoever touches it would hang.
func (n *node) takeBackVolume(ctx context.Context, id volumeID, target string) (*deferral.Volume, error) {
	if slices.Contains(n.records.get(id).Plain, target) {
		return nil, nil //nolint:nilnil // there is none, which is no failure
	}
	gone, err := n.cfg.Volumes.Unstage(ctx, target)
	if gone == nil && deferral.KindOf(err) == deferral.Invalid {
		return nil, nil //nolint:nilnil // a target that lies elsewhere is no deferred one
	}
	return gone, err
}

// unpublishFromDriver has the driver take back what it published, at the private
// path, at kubelet's own, or both where nothing tells which.
func (n *node) unpublishFromDriver(
	ctx context.Context, id volumeID, req *csi.NodeUnpublishVolumeRequest, gone *deferral.Volume,
	forward func(context.Context) ([]byte, error),
) ([]byte, error) {
	device := n.private.publish(id, req.GetTargetPath())
	private := n.private.exists(dirOf(device))
	if private {
		if err := n.driverUnpublish(ctx, id, device, false); err != nil {
			return nil, err
		}
		failpoint.Hit("front-unpublish-private")
		if err := n.private.removePublish(device); err != nil {
			return nil, err
		}
	}
	switch {
	case gone != nil && gone.CSI != nil && gone.CSI.Way == deferral.WayNative:
		return n.unpublishNative(ctx, req)
	case private && (gone != nil || n.removeEmptyTarget(req.GetTargetPath())):
		return proto.Marshal(&csi.NodeUnpublishVolumeResponse{})
	default:
		return forward(ctx)
	}
}

// removeEmptyTarget removes what is left of a target whose record was lost, and
// tells whether nothing is there any more. What is not an empty directory is not
// ours: the driver is asked.
func (n *node) removeEmptyTarget(target string) bool {
	root, rel, err := n.private.open(target)
	if err != nil {
		return false
	}
	defer func() { _ = root.Close() }()
	info, err := root.Lstat(rel)
	if err != nil {
		return true
	}
	return info.IsDir() && root.Remove(rel) == nil
}

// unpublishNative tells a driver that defers by itself what kind of volume it
// was; one that was downgraded does not hear the word.
func (n *node) unpublishNative(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) ([]byte, error) {
	has, err := n.capabilities(ctx)
	if err != nil {
		return nil, err
	}
	if err := n.driverUnpublish(ctx, n.id(req.GetVolumeId()), req.GetTargetPath(), has.native); err != nil {
		return nil, err
	}
	return proto.Marshal(&csi.NodeUnpublishVolumeResponse{})
}

func (n *node) driverUnpublish(ctx context.Context, id volumeID, where string, deferred bool) error {
	req := &csi.NodeUnpublishVolumeRequest{VolumeId: id.id, TargetPath: where}
	if deferred {
		csidefer.SetRequested(req)
	}
	if err := n.call(ctx, csi.Node_NodeUnpublishVolume_FullMethodName, req, &csi.NodeUnpublishVolumeResponse{}); err != nil {
		return n.driverError("asked to unpublish the volume", err, nil)
	}
	return nil
}

// forgetPlain takes a target from the record of a volume.
func (n *node) forgetPlain(id volumeID, target string) error {
	rec := n.records.get(id)
	if !slices.Contains(rec.Plain, target) {
		return nil
	}
	rec.Plain = slices.DeleteFunc(rec.Plain, func(t string) bool { return t == target })
	return n.records.put(rec)
}
