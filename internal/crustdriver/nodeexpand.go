package crustdriver

import (
	"context"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
)

// NodeExpandVolume makes the loop devices take up the size of the image and, where
// a filesystem is mounted on the node, makes that grow too.
func (d *Driver) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	id, path := req.GetVolumeId(), req.GetVolumePath()
	if path == "" {
		return nil, status.Errorf(codes.InvalidArgument, "volume %q: volume_path is missing", id)
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
	if err := d.checkExpand(r, path, req); err != nil {
		return nil, err
	}
	if err := d.makeImage(r); err != nil {
		return nil, err
	}
	if err := d.growDevices(id); err != nil {
		return nil, err
	}
	if !d.present(r).Block && req.GetVolumeCapability().GetBlock() == nil && !csidefer.Requested(req) {
		if err := d.growMounted(id, path); err != nil {
			return nil, err
		}
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: r.Capacity}, nil
}

func (d *Driver) checkExpand(r *record, path string, req *csi.NodeExpandVolumeRequest) error {
	there := d.present(r)
	if there == nil {
		return status.Errorf(codes.NotFound, "volume %q is not on this node", r.ID)
	}
	if _, ok := there.Published[path]; !ok && path != there.Staging && req.GetStagingTargetPath() != there.Staging {
		return status.Errorf(codes.NotFound, "volume %q is not at %s", r.ID, path)
	}
	required, limit := req.GetCapacityRange().GetRequiredBytes(), req.GetCapacityRange().GetLimitBytes()
	if required > r.Capacity || limit > 0 && r.Capacity > limit {
		return status.Errorf(codes.OutOfRange, "volume %q has %d bytes: the controller has to expand it to what is asked for first", r.ID, r.Capacity)
	}
	return nil
}

// growMounted makes the filesystem grow, if it is mounted here for writing.
func (d *Driver) growMounted(id, path string) error {
	m, err := d.mountedAt(id, path)
	if err != nil || m == nil {
		return err
	}
	for option := range strings.SplitSeq(m.VFSOptions, ",") {
		if option == "ro" {
			return nil
		}
	}
	return d.growFS(id, m.Source, path)
}
