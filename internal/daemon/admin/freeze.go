package admin

import (
	"context"

	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// FreezeVolume blocks all writes to a volume, for at most the given time.
func (s *AdminServer) FreezeVolume(
	ctx context.Context, req *adminv1.FreezeVolumeRequest,
) (*adminv1.FreezeVolumeResponse, error) {
	able, v, err := s.freezerOf(ctx, req.GetVolume())
	if err != nil {
		return nil, err
	}
	most := req.GetTimeout()
	if most.CheckValid() != nil || most.AsDuration() <= 0 {
		return nil, volume.Errorf(volume.Invalid, "volume %s: timeout is missing: say when writes go on by themselves", v.Target)
	}
	return &adminv1.FreezeVolumeResponse{}, able.Freeze(ctx, v, most.AsDuration())
}

// ThawVolume allows writes again.
func (s *AdminServer) ThawVolume(ctx context.Context, req *adminv1.ThawVolumeRequest) (*adminv1.ThawVolumeResponse, error) {
	able, v, err := s.freezerOf(ctx, req.GetVolume())
	if err == nil {
		err = able.Thaw(ctx, v)
	}
	return &adminv1.ThawVolumeResponse{}, err
}

func (s *AdminServer) freezerOf(ctx context.Context, ref string) (runtime.Freezer, *volume.Volume, error) {
	found, err := s.live(ctx, ref)
	if err != nil {
		return nil, nil, err
	}
	handler, err := s.Node.HandlerOf(found.Volume, volume.Unsupported)
	if err != nil {
		return nil, nil, err
	}
	able, ok := handler.(runtime.Freezer)
	if !ok {
		return nil, nil, volume.Errorf(volume.Unsupported, "volume %s: the sandboxes of the handler %s cannot be told to hold "+
			"writes: freeze the filesystem from within the pod", found.Target, found.Handler)
	}
	return able, found.Volume, nil
}
