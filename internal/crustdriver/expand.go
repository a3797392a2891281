package crustdriver

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
)

// ControllerExpandVolume gives the image its new size. The node then makes the
// loop device, and the filesystem, take it up.
func (d *Driver) ControllerExpandVolume(ctx context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	id := req.GetVolumeId()
	if req.GetCapacityRange() == nil {
		return nil, status.Errorf(codes.InvalidArgument, "volume %q: capacity_range is missing", id)
	}
	release, err := d.locks.take(ctx, id)
	if err != nil {
		return nil, err
	}
	defer release()
	r, err := d.find(id)
	if err != nil {
		return nil, err
	}
	size, err := readRange(req.GetCapacityRange())
	if err != nil {
		return nil, err
	}
	if limit := req.GetCapacityRange().GetLimitBytes(); limit > 0 && r.Capacity > limit {
		return nil, status.Errorf(codes.OutOfRange, "volume %q has %d bytes already, more than the limit of %d", id, r.Capacity, limit)
	}
	if more := size - r.Capacity; more > 0 && req.GetCapacityRange().GetRequiredBytes() > r.Capacity {
		r.Capacity = size
		if err := d.promise(r, more); err != nil {
			return nil, err
		}
	}
	failpoint.Hit("driver-expand-recorded")
	// Also where an earlier life was killed between the record and this.
	if err := d.makeImage(r); err != nil {
		return nil, err
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: r.Capacity, NodeExpansionRequired: true}, nil
}
