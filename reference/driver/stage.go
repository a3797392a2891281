package driver

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
)

// NodeStageVolume attaches a volume and, unless it is a block volume or the driver
// is native, mounts its filesystem at the staging path.
func (n *nodeServer) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	id, path := req.GetVolumeId(), req.GetStagingTargetPath()
	want, err := checkStage(req)
	if err != nil {
		return nil, err
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
		if before == nil {
			err = afterUndo(err, n.unstage(r, path))
		}
		return nil, err
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

func checkStage(req *csi.NodeStageVolumeRequest) (access, error) {
	if err := checkID(req.GetVolumeId()); err != nil {
		return access{}, err
	}
	if err := checkPath("staging_target_path", req.GetStagingTargetPath()); err != nil {
		return access{}, err
	}
	return readAccess(req.GetVolumeCapability())
}

// checkRestage checks that a volume that is staged already is staged as requested.
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
	if err := n.pool.beginWriting(r); err != nil {
		return err
	}
	return n.fs.mountFS(ctx, r.ID, device, path, want)
}

// NodeUnstageVolume undoes NodeStageVolume. It succeeds for a volume that is not staged there.
func (n *nodeServer) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	id, path := req.GetVolumeId(), req.GetStagingTargetPath()
	if err := errors.Join(checkID(id), checkPath("staging_target_path", path)); err != nil {
		return nil, err
	}
	release, err := n.locks.take(ctx, id)
	if err != nil {
		return nil, err
	}
	defer release()
	r, err := n.pool.volume(id)
	if err != nil || r == nil || r.Ephemeral {
		return &csi.NodeUnstageVolumeResponse{}, err
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

// unstage unmounts and detaches the volume, and then updates its record.
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
