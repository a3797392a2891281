package crustdriver

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
)

// NodeStageVolume attaches a volume and, unless it is a block volume or the driver
// is native, mounts its filesystem at the staging path.
func (d *Driver) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	id, path := req.GetVolumeId(), req.GetStagingTargetPath()
	want, err := checkStage(req)
	if err != nil {
		return nil, err
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
	if r.Ephemeral {
		return nil, status.Errorf(codes.InvalidArgument, "volume %q is ephemeral, and those are not staged", id)
	}
	before := d.present(r)
	if err := checkRestage(id, before, path, want); err != nil {
		return nil, err
	}
	if before == nil || before.Staging == "" {
		r.Node = &node{Boot: d.boot, Staging: path, Block: want.block, FSType: want.fsType, ReadOnly: want.readOnly}
		if err := d.store.save(r); err != nil {
			return nil, err
		}
		failpoint.Hit("driver-stage-recorded")
	}
	if err := d.stage(ctx, r, path, want); err != nil {
		if before == nil {
			err = errors.Join(err, d.unstage(r, path))
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

// checkRestage compares with how the volume is staged already.
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

func (d *Driver) stage(ctx context.Context, r *record, path string, want access) error {
	if err := d.makeImage(r); err != nil { // an expansion may have been cut off
		return err
	}
	device, err := d.attach(r.ID, want.block && want.readOnly)
	if err != nil {
		return err
	}
	if err := d.growDevices(r.ID); err != nil {
		return err
	}
	if want.block || d.config.Defer {
		return nil
	}
	return d.mountFS(ctx, r.ID, device, path, want)
}

// mountFS mounts a volume's filesystem, made where the device is blank, and lets
// it grow to the device.
func (d *Driver) mountFS(ctx context.Context, id, device, path string, want access) error {
	if m, err := d.mountedAt(id, path); err != nil || m != nil {
		return err
	}
	if err := d.makeFS(ctx, id, device, want); err != nil {
		return err
	}
	if want.fsType == "ext4" && !want.readOnly {
		if err := d.growExt(ctx, id, device); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(path, 0o750); err != nil {
		return err
	}
	var options []string
	if want.readOnly {
		options = append(options, "ro")
	}
	// As sensitive ones the flags stay out of errors.
	if err := d.mounter.FormatAndMountSensitive(device, path, want.fsType, options, want.flags); err != nil {
		return fmt.Errorf("volume %q: mount %s at %s: %w", id, want.fsType, path, err)
	}
	failpoint.Hit("driver-mounted")
	if want.readOnly {
		return nil
	}
	return d.growFS(id, device, path)
}

func (d *Driver) growFS(id, device, path string) error {
	need, err := d.resizer.NeedResize(device, path)
	if err == nil && need {
		_, err = d.resizer.Resize(device, path)
	}
	if err != nil {
		return fmt.Errorf("volume %q: grow its filesystem: %w", id, err)
	}
	return nil
}

// NodeUnstageVolume undoes NodeStageVolume; what is not staged there is fine.
func (d *Driver) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	id, path := req.GetVolumeId(), req.GetStagingTargetPath()
	if err := errors.Join(checkID(id), checkPath("staging_target_path", path)); err != nil {
		return nil, err
	}
	release, err := d.locks.take(ctx, id)
	if err != nil {
		return nil, err
	}
	defer release()
	r, err := d.store.load(id)
	if err != nil || r == nil || r.Ephemeral {
		return &csi.NodeUnstageVolumeResponse{}, err
	}
	staged := d.present(r)
	if staged != nil && staged.Staging != "" && staged.Staging != path {
		return &csi.NodeUnstageVolumeResponse{}, nil
	}
	if staged != nil {
		for target := range staged.Published {
			return nil, status.Errorf(codes.FailedPrecondition, "volume %q is still published at %s", id, target)
		}
	}
	return &csi.NodeUnstageVolumeResponse{}, d.unstage(r, path)
}

// unstage unmounts, detaches and forgets, in this order.
func (d *Driver) unstage(r *record, path string) error {
	if err := d.unmountVolume(r.ID, path); err != nil {
		return err
	}
	failpoint.Hit("driver-unmounted")
	if err := d.detach(r.ID, false); err != nil {
		return err
	}
	if r.Node == nil {
		return nil
	}
	r.Node = nil
	return d.store.save(r)
}
