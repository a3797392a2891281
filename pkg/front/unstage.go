package front

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// unstageVolume has the driver unstage what it staged. Where the record was lost
// both places are tried: the private one is known by the request alone.
func (n *node) unstageVolume(ctx context.Context, raw []byte, forward forwardFunc) ([]byte, error) {
	req := &csi.NodeUnstageVolumeRequest{}
	if err := proto.Unmarshal(raw, req); err != nil {
		return nil, unreadable(err)
	}
	if req.GetVolumeId() == "" || req.GetStagingTargetPath() == "" {
		return forward(ctx, raw)
	}
	id := n.id(req.GetVolumeId())
	end, err := n.turns.take(ctx, id)
	if err != nil {
		return nil, err
	}
	defer end()
	if err := n.refuseLiving(id); err != nil {
		return nil, err
	}
	rec := n.records.get(id)
	reply, err := n.unstageEverywhere(ctx, &rec, req, raw, forward)
	if err != nil {
		return nil, err
	}
	failpoint.Hit("front-unstage-driver")
	rec.Stage, rec.Plain = nil, nil
	if err := n.records.put(rec); err != nil {
		return nil, err
	}
	n.memory.forget(id)
	volume := clip(id.id)
	n.refused.forget(func(r *deferral.Refusal) bool { return r.Driver == n.name && r.VolumeID == volume })
	return reply, nil
}

// refuseLiving keeps a device from being taken away under a pod.
func (n *node) refuseLiving(id volumeID) error {
	living := n.cfg.Volumes.OfCSI(n.name, id.id)
	if len(living) == 0 {
		return nil
	}
	return deferral.Errorf(deferral.Busy, "volume %s of driver %s: it is still published at %s: unpublish it first",
		clip(id.id), n.name, living[0].Target)
}

func (n *node) unstageEverywhere(
	ctx context.Context, rec *volumeRecord, req *csi.NodeUnstageVolumeRequest, raw []byte, forward forwardFunc,
) ([]byte, error) {
	private := n.private.staging(n.id(rec.ID), req.GetStagingTargetPath())
	there := n.private.exists(private)
	if there {
		if err := n.driverUnstage(ctx, rec.ID, private); err != nil {
			return nil, err
		}
		if err := n.private.removeStaging(private); err != nil {
			return nil, err
		}
	}
	if there && rec.Stage != nil && rec.Stage.At == stagedPrivately {
		return proto.Marshal(&csi.NodeUnstageVolumeResponse{})
	}
	return forward(ctx, raw)
}
