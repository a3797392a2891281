package crustdriver

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/loopdev"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
)

// NodeGetVolumeStats tells the use of a volume and whether all is well with it. Of
// a deferred volume the node can tell the size only.
func (d *Driver) NodeGetVolumeStats(_ context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	id, path := req.GetVolumeId(), req.GetVolumePath()
	if path == "" {
		return nil, status.Errorf(codes.InvalidArgument, "volume %q: volume_path is missing", id)
	}
	r, err := d.find(id)
	if err != nil {
		return nil, err
	}
	there := d.present(r)
	block := there != nil && there.Block
	if deferred := there != nil && there.Published[path].Deferred; !deferred && !csidefer.Requested(req) {
		m, err := d.mountedAt(id, path)
		if err != nil || m == nil {
			return nil, status.Errorf(codes.NotFound, "volume %q is not at %s", id, path)
		}
		if !block {
			return d.fsStats(r, path, m.VFSOptions)
		}
	} else if !deferred {
		return nil, status.Errorf(codes.NotFound, "volume %q is not published deferred at %s", id, path)
	}
	return &csi.NodeGetVolumeStatsResponse{
		Usage:           []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: r.Capacity}},
		VolumeCondition: d.condition(r, ""),
	}, nil
}

func (d *Driver) fsStats(r *record, path, options string) (*csi.NodeGetVolumeStatsResponse, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return nil, fmt.Errorf("volume %q: statfs %s: %w", r.ID, path, err)
	}
	//nolint:gosec // no filesystem has 2^63 bytes or inodes
	usage := []*csi.VolumeUsage{
		{
			Unit: csi.VolumeUsage_BYTES, Total: int64(fs.Blocks) * fs.Bsize, Available: int64(fs.Bavail) * fs.Bsize,
			Used: int64(fs.Blocks-fs.Bfree) * fs.Bsize,
		},
		{Unit: csi.VolumeUsage_INODES, Total: int64(fs.Files), Available: int64(fs.Ffree), Used: int64(fs.Files - fs.Ffree)},
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: usage, VolumeCondition: d.condition(r, options)}, nil
}

// condition looks for what would make a volume fail.
func (d *Driver) condition(r *record, mountOptions string) *csi.VolumeCondition {
	bad := func(message string) *csi.VolumeCondition {
		return &csi.VolumeCondition{Abnormal: true, Message: message}
	}
	info, err := os.Stat(d.image(r.ID))
	if err != nil {
		return bad("the image cannot be seen: " + err.Error())
	}
	if info.Size() < r.Capacity {
		return bad(fmt.Sprintf("the image has %d bytes instead of %d", info.Size(), r.Capacity))
	}
	if devices, err := loopdev.Over(info); err != nil || len(devices) == 0 {
		return bad("no loop device is attached to the image")
	}
	if strings.Contains(","+mountOptions+",", ",emergency_ro,") || strings.Contains(","+mountOptions+",", ",shutdown,") {
		return bad("the kernel has stopped writing to the filesystem after an error")
	}
	return &csi.VolumeCondition{Message: "the image is attached"}
}
