package driver

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
)

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
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		reply.Capabilities = append(reply.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: kind}},
		})
	}
	return reply, nil
}

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

// NodeExpandVolume grows the loop devices to the size of the image, and the filesystem if it is mounted on the node.
func (n *nodeServer) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	id, path := req.GetVolumeId(), req.GetVolumePath()
	if path == "" {
		return nil, status.Errorf(codes.InvalidArgument, "volume %q: volume_path is missing", id)
	}
	r, release, err := n.locks.record(ctx, id, n.pool.find)
	if err != nil {
		return nil, err
	}
	defer release()
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

// NodeGetVolumeStats returns the usage of a volume. Of a deferred volume, only the size is known on the node.
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

// NodeGetVolumeHealth returns what is wrong with a volume. It takes no lock: another call on the volume may hang.
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

// NodeStageVolume attaches a volume, and mounts its filesystem unless it is a block volume or the driver is native.
func (n *nodeServer) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	id, path := req.GetVolumeId(), req.GetStagingTargetPath()
	want, err := readAccess(req.GetVolumeCapability())
	if err := cmp.Or(checkID(id), checkPath("staging_target_path", path), err); err != nil {
		return nil, err
	}
	r, release, err := n.locks.record(ctx, id, n.pool.find)
	if err != nil {
		return nil, err
	}
	defer release()
	if r.Ephemeral {
		return nil, status.Errorf(codes.InvalidArgument, "volume %q is ephemeral, and those are not staged", id)
	}
	before := n.current(r)
	if err := checkRestage(id, before, path, want); err != nil {
		return nil, err
	}
	if before == nil || before.Staging == "" {
		r.Node = &node{Boot: n.boot, Staging: path, Block: want.block, FSType: want.fsType, ReadOnly: want.readOnly}
		if err := n.pool.store.save(r); err != nil {
			return nil, err
		}
		failpoint.Hit("driver-stage-recorded")
	}
	if err := n.stage(ctx, r, path, want); err != nil {
		if before != nil {
			return nil, notUndone(err)
		}
		return nil, afterUndo(err, n.unstage(r, path))
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

func checkRestage(id string, staged *node, path string, want access) error {
	switch {
	case staged == nil || staged.Staging == "":
		return nil
	case staged.Staging != path:
		return status.Errorf(codes.FailedPrecondition, "volume %q is staged at %s: unstage it there first", id, staged.Staging)
	case staged.Block != want.block || staged.FSType != want.fsType || staged.ReadOnly != want.readOnly:
		return status.Errorf(codes.AlreadyExists, "volume %q is staged with another volume_capability: unstage it first", id)
	}
	return nil
}

func (n *nodeServer) stage(ctx context.Context, r *record, path string, want access) error {
	if err := n.pool.makeImage(r); err != nil { // an expansion may have been interrupted
		return err
	}
	device, err := n.pool.attach(r, want.block && want.readOnly)
	if err != nil {
		return err
	}
	if err := n.pool.growDevices(r.ID); err != nil {
		return err
	}
	if want.block || n.config.Defer {
		return nil
	}
	if err := n.pool.beginWriting(r, false); err != nil {
		return err
	}
	return n.fs.mountFS(ctx, r.ID, device, path, want)
}

// NodeUnstageVolume undoes NodeStageVolume. It succeeds for a volume that is not staged there.
func (n *nodeServer) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	id, path := req.GetVolumeId(), req.GetStagingTargetPath()
	if err := cmp.Or(checkID(id), checkPath("staging_target_path", path)); err != nil {
		return nil, err
	}
	r, release, err := n.locks.record(ctx, id, n.pool.volume)
	if err != nil {
		return nil, err
	}
	defer release()
	if r == nil || r.Ephemeral {
		return &csi.NodeUnstageVolumeResponse{}, nil
	}
	staged := n.current(r)
	if staged != nil && staged.Staging != "" && staged.Staging != path {
		return &csi.NodeUnstageVolumeResponse{}, nil
	}
	if staged != nil {
		for target := range staged.Published {
			return nil, status.Errorf(codes.FailedPrecondition, "volume %q is still published at %s", id, target)
		}
	}
	return &csi.NodeUnstageVolumeResponse{}, n.unstage(r, path)
}

func (n *nodeServer) unstage(r *record, path string) error {
	if err := n.pool.unmountVolume(r.ID, path); err != nil {
		return err
	}
	failpoint.Hit("driver-unmounted")
	if err := n.pool.detach(r.ID, false); err != nil {
		return err
	}
	if r.Node == nil {
		return nil
	}
	r.Node = nil
	return n.pool.store.save(r)
}

type volumeFaults = []*csi.VolumeHealth_VolumeHealthEntry

func volumeFault(kind csi.VolumeHealthErrorType, reason, message string) volumeFaults {
	return volumeFaults{{Status: kind, Reason: reason, Message: message}}
}

func (l *pool) checkImage(r *record) volumeFaults {
	info, err := os.Stat(l.image(r.ID))
	if err != nil {
		return volumeFault(csi.VolumeHealthErrorType_INACCESSIBLE, "ImageMissing", "the image cannot be seen: "+err.Error())
	}
	if info.Size() < r.Capacity {
		// It may be an expansion that was interrupted, and no loss of data.
		return volumeFault(csi.VolumeHealthErrorType_DEGRADED, "ImageTooSmall",
			fmt.Sprintf("the image has %d bytes instead of %d", info.Size(), r.Capacity))
	}
	return nil
}

// checkNode checks a staged volume's loop device, and its filesystem if that is mounted here, and not deferred.
func (l *pool) checkNode(r *record, there *node, target string) volumeFaults {
	if _, err := os.Stat(l.image(r.ID)); err != nil {
		return nil // it was removed a moment ago
	}
	if devices, err := loopdev.Over(l.image(r.ID)); err != nil || len(devices) == 0 {
		return volumeFault(csi.VolumeHealthErrorType_INACCESSIBLE, "DeviceDetached", "no loop device is attached to the image")
	}
	if there.Block {
		return nil
	}
	for _, path := range []string{target, there.Staging} {
		if path == "" {
			continue
		}
		if m, err := l.mountedAt(r.ID, path); err == nil && m != nil {
			return checkMount(m)
		}
	}
	return nil
}

func checkMount(m *mountinfo.Info) volumeFaults {
	// After the kernel stopped writing, the mount itself is still read-write.
	root, err := sys.OpenDir(m.Mountpoint)
	if err != nil {
		return nil
	}
	defer sys.CloseFD(root)
	report, err := fsops.Stat(root, slices.Contains(strings.Split(m.Options, ","), "ro"))
	if err != nil || !report.Condition.Abnormal {
		return nil // or it is being unmounted
	}
	kind := csi.VolumeHealthErrorType_DEGRADED
	if report.Condition.Reason == abi.ReasonShutDown {
		kind = csi.VolumeHealthErrorType_INACCESSIBLE
	}
	return volumeFault(kind, report.Condition.Reason, report.Condition.Message)
}
