package adminapi

import (
	"context"

	"github.com/crust-proxy/crust-proxy/internal/rpccode"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// FreezeVolume holds all writes to a volume.
func (s *AdminServer) FreezeVolume(
	ctx context.Context, req *adminv1.FreezeVolumeRequest,
) (*adminv1.FreezeVolumeResponse, error) {
	found, err := s.live(ctx, req.GetVolume())
	if err != nil {
		return nil, err
	}
	handler, err := s.Node.freezerOf(found.Volume)
	if err == nil {
		err = checkFreeze(found.Volume, req)
	}
	if err == nil {
		err = handler.Freeze(ctx, found.Volume, req.GetTimeout().AsDuration())
	}
	if err != nil {
		return nil, rpccode.Status(err)
	}
	return &adminv1.FreezeVolumeResponse{}, nil
}

// checkFreeze wants a time that a person has chosen.
func checkFreeze(v *volume.Volume, req *adminv1.FreezeVolumeRequest) error {
	if err := req.GetTimeout().CheckValid(); err != nil || req.GetTimeout().AsDuration() <= 0 {
		return volume.Errorf(volume.Invalid, "volume %s: timeout is missing: say when writes go on by themselves", v.Target)
	}
	return nil
}

// ThawVolume lets writes go on.
func (s *AdminServer) ThawVolume(ctx context.Context, req *adminv1.ThawVolumeRequest) (*adminv1.ThawVolumeResponse, error) {
	found, err := s.live(ctx, req.GetVolume())
	if err != nil {
		return nil, err
	}
	handler, err := s.Node.freezerOf(found.Volume)
	if err == nil {
		err = handler.Thaw(ctx, found.Volume)
	}
	if err != nil {
		return nil, rpccode.Status(err)
	}
	return &adminv1.ThawVolumeResponse{}, nil
}

func (n *Node) freezerOf(v *volume.Volume) (runtime.Freezer, error) {
	handler, err := n.handlerOf(v)
	if err != nil {
		return nil, err
	}
	able, ok := handler.(runtime.Freezer)
	if !ok {
		return nil, volume.Errorf(volume.Unsupported, "volume %s: the sandboxes of the handler %s cannot be told to hold "+
			"writes: freeze the filesystem from within the pod", v.Target, v.Handler)
	}
	return able, nil
}
