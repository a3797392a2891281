package crustdriver

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"go.uber.org/zap"
)

// GetCapacity tells what can still be promised.
func (d *Driver) GetCapacity(_ context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	none := &csi.GetCapacityResponse{MaximumVolumeSize: wrapperspb.Int64(0)}
	if len(req.GetVolumeCapabilities()) > 0 && readAccesses(req.GetVolumeCapabilities()) != nil {
		return none, nil
	}
	if at, ok := req.GetAccessibleTopology().GetSegments()[d.topologyKey()]; ok && at != d.config.NodeID {
		return none, nil
	}
	free, err := d.available()
	if err != nil {
		return nil, err
	}
	return &csi.GetCapacityResponse{
		AvailableCapacity: free, MaximumVolumeSize: wrapperspb.Int64(min(free, mostSize)), MinimumVolumeSize: wrapperspb.Int64(leastSize),
	}, nil
}

// available is what is free of the configured capacity. Without one images are
// thin: it is what the filesystem has free now.
func (d *Driver) available() (int64, error) {
	if d.config.Capacity == 0 {
		var fs unix.Statfs_t
		if err := unix.Statfs(d.images, &fs); err != nil {
			return 0, err
		}
		return int64(fs.Bavail) * fs.Bsize, nil //nolint:gosec // no filesystem has 2^63 bytes
	}
	all, err := d.store.list()
	if err != nil {
		d.log.Warn("volumes whose records cannot be read are not counted", zap.Error(err))
	}
	free := d.config.Capacity
	for _, r := range all {
		free -= r.Capacity
	}
	return max(free, 0), nil
}

// promise records a volume with more bytes promised to it, if there are as many.
func (d *Driver) promise(r *record, more int64) error {
	d.provisioning.Lock()
	defer d.provisioning.Unlock()
	free, err := d.available()
	if err != nil {
		return err
	}
	if more > free {
		return status.Errorf(codes.ResourceExhausted, "volume %q: %d bytes are asked for and %d are free on node %s", r.ID, more, free, d.config.NodeID)
	}
	return d.store.save(r)
}
