package driver

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
)

// nodeServer serves CSI's Node.
type nodeServer struct {
	csi.UnimplementedNodeServer

	config Config
	boot   string
	locks  *locks
	pool   *pool
	fs     *filesystems
}

// maxVolumes is how many volumes the scheduler may place on a node.
const maxVolumes = 256

// NodeGetCapabilities lists what the node plugin can do; csidefer adds deferral.
func (n *nodeServer) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	reply := &csi.NodeGetCapabilitiesResponse{}
	for _, kind := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		reply.Capabilities = append(reply.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: kind}},
		})
	}
	return reply, nil
}

// NodeGetInfo returns the node's id and topology.
func (n *nodeServer) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: n.config.NodeID, MaxVolumesPerNode: maxVolumes, AccessibleTopology: n.config.topology()}, nil
}

// current returns how a volume is staged and published since the node booted, or nil.
func (n *nodeServer) current(r *record) *node {
	if r == nil || r.Node == nil || r.Node.Boot != n.boot {
		return nil
	}
	return r.Node
}

// checkPath checks that a staging or target path is absolute.
func checkPath(field, path string) error {
	if path == "" || !filepath.IsAbs(path) {
		return status.Errorf(codes.InvalidArgument, "%s must be an absolute path", field)
	}
	return nil
}

func checkID(id string) error {
	if id == "" || len(id) > maxID {
		return status.Errorf(codes.InvalidArgument, "volume_id is missing, or longer than %d bytes", maxID)
	}
	return nil
}

// NodeExpandVolume grows the loop devices to the size of the image, and the filesystem if it is
// mounted on the node.
func (n *nodeServer) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	id, path := req.GetVolumeId(), req.GetVolumePath()
	if path == "" {
		return nil, status.Errorf(codes.InvalidArgument, "volume %q: volume_path is missing", id)
	}
	release, err := n.locks.take(ctx, id)
	if err != nil {
		return nil, err
	}
	defer release()
	r, err := n.pool.find(id)
	if err != nil {
		return nil, err
	}
	if err := n.checkExpand(r, path, req); err != nil {
		return nil, err
	}
	if err := n.pool.makeImage(r); err != nil {
		return nil, err
	}
	if err := n.pool.growDevices(id); err != nil {
		return nil, err
	}
	if !n.current(r).Block && req.GetVolumeCapability().GetBlock() == nil && !csidefer.Requested(req) {
		if err := n.fs.growMounted(id, path); err != nil {
			return nil, err
		}
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: r.Capacity}, nil
}

func (n *nodeServer) checkExpand(r *record, path string, req *csi.NodeExpandVolumeRequest) error {
	there := n.current(r)
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

// NodeGetVolumeStats returns the usage of a volume. Of a deferred volume, only the size is known
// on the node.
func (n *nodeServer) NodeGetVolumeStats(_ context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	id, path := req.GetVolumeId(), req.GetVolumePath()
	if path == "" {
		return nil, status.Errorf(codes.InvalidArgument, "volume %q: volume_path is missing", id)
	}
	r, err := n.pool.find(id)
	if err != nil {
		return nil, err
	}
	there := n.current(r)
	block := there != nil && there.Block
	if deferred := there != nil && there.Published[path].Deferred; !deferred && !csidefer.Requested(req) {
		m, err := n.pool.mountedAt(id, path)
		if err != nil || m == nil {
			return nil, status.Errorf(codes.NotFound, "volume %q is not at %s", id, path)
		}
		if !block {
			return fsStats(id, path)
		}
	} else if !deferred {
		return nil, status.Errorf(codes.NotFound, "volume %q is not published deferred at %s", id, path)
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: r.Capacity}}}, nil
}

func fsStats(id, path string) (*csi.NodeGetVolumeStatsResponse, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return nil, fmt.Errorf("volume %q: statfs %s: %w", id, path, err)
	}
	//nolint:gosec // no filesystem has 2^63 bytes or inodes
	usage := []*csi.VolumeUsage{
		{
			Unit: csi.VolumeUsage_BYTES, Total: int64(fs.Blocks) * fs.Bsize, Available: int64(fs.Bavail) * fs.Bsize,
			Used: int64(fs.Blocks-fs.Bfree) * fs.Bsize,
		},
		{Unit: csi.VolumeUsage_INODES, Total: int64(fs.Files), Available: int64(fs.Ffree), Used: int64(fs.Files - fs.Ffree)},
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: usage}, nil
}

// NodeGetVolumeHealth returns what is wrong with a volume. It takes no lock, so that it answers
// even while another call on the volume hangs.
func (n *nodeServer) NodeGetVolumeHealth(_ context.Context, req *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	r, err := n.pool.find(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	found := n.pool.checkImage(r)
	if there := n.current(r); there != nil && len(found) == 0 {
		found = n.pool.checkNode(r, there, req.GetVolumePublishPath())
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: &csi.VolumeHealth{VolumeId: r.ID, HealthStatuses: found}}, nil
}

// NodeGetStorageHealth returns what is wrong with the filesystem that holds all images.
func (n *nodeServer) NodeGetStorageHealth(context.Context, *csi.NodeGetStorageHealthRequest) (*csi.NodeGetStorageHealthResponse, error) {
	return &csi.NodeGetStorageHealthResponse{BackendHealth: checkStorage(n.pool.images)}, nil
}
