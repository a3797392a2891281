package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/mount-utils"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
)

var fileSystems = []string{"ext4", "xfs"} // the first is the default

func (d *driver) image(id string) string { return filepath.Join(d.data, filepath.Base(id)+".img") }

// marker names the filesystem of a volume. Deferred: a repeated publish must not open the device to look,
// because a sandbox may have it by then.
func (d *driver) marker(id string) string { return d.image(id) + ".fs" }

// check refuses a request that lacks something, or is about no volume. It returns the volume's size and device,
// which is empty if it is not attached.
func (d *driver) check(id string, required ...string) (size int64, device string, err error) {
	if id == "" || slices.Contains(required, "") {
		return 0, "", status.Error(codes.InvalidArgument, "a required field is missing")
	}
	file, err := os.Stat(d.image(id))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, "", status.Errorf(codes.NotFound, "there is no volume %q", id)
	}
	if err != nil {
		return 0, "", err
	}
	loops, err := loopdev.Over(d.image(id))
	for _, loop := range loops {
		if !loop.Leaving { // one that is leaving may be another volume's in a moment
			device = loop.Path
		}
	}
	return file.Size(), device, err
}

// free refuses while the device of the volume's last use is leaving: another program still has it open.
func (d *driver) free(id string) error {
	loops, err := loopdev.Over(d.image(id))
	if len(loops) > 0 {
		err = status.Errorf(codes.Aborted, "volume %s: another program still uses %s", id, loops[0].Path)
	}
	return err
}

// fsTypeOf returns the filesystem that is asked for. It refuses what this driver cannot do.
func fsTypeOf(access *csi.VolumeCapability) (string, error) {
	fsType := cmp.Or(access.GetMount().GetFsType(), fileSystems[0])
	if access.GetMount() == nil || !slices.Contains(fileSystems, fsType) {
		return "", status.Errorf(codes.InvalidArgument, "volume_capability: give mount with one of %v", fileSystems)
	}
	return fsType, nil
}

// CreateVolume derives the id from the request alone, so that a repetition finds the volume.
func (d *driver) CreateVolume(_ context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	for _, access := range req.GetVolumeCapabilities() {
		if _, err := fsTypeOf(access); err != nil {
			return nil, err
		}
	}
	id := fmt.Sprintf("%x", sha256.Sum256([]byte(req.GetName())))[:32]
	wanted := req.GetCapacityRange()
	size, _, err := d.check(id, req.GetName())
	if status.Code(err) == codes.NotFound {
		size = max(wanted.GetRequiredBytes(), 512<<20)
		err = resize(d.image(id), size)
	}
	if err == nil && (size < wanted.GetRequiredBytes() || wanted.GetLimitBytes() > 0 && size > wanted.GetLimitBytes()) {
		err = status.Errorf(codes.AlreadyExists, "volume %q has %d bytes", req.GetName(), size)
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: id, CapacityBytes: size}}, err
}

func resize(image string, size int64) error {
	file, err := os.OpenFile(image, os.O_WRONLY|os.O_CREATE, 0o600) //nolint:gosec // a path of our own
	if err != nil {
		return err
	}
	return errors.Join(file.Truncate(size), file.Close())
}

func (d *driver) ControllerExpandVolume(_ context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	size, _, err := d.check(req.GetVolumeId())
	if wanted := req.GetCapacityRange().GetRequiredBytes(); err == nil && wanted > size {
		size, err = wanted, resize(d.image(req.GetVolumeId()), wanted)
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: size, NodeExpansionRequired: true}, err
}

func (d *driver) DeleteVolume(_ context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	_, device, err := d.check(req.GetVolumeId())
	switch {
	case status.Code(err) == codes.NotFound:
		err = nil
	case err == nil && device != "":
		err = status.Errorf(codes.FailedPrecondition, "volume %s is attached as %s", req.GetVolumeId(), device)
	case err == nil:
		if err = d.free(req.GetVolumeId()); err == nil {
			err = errors.Join(os.RemoveAll(d.marker(req.GetVolumeId())), os.Remove(d.image(req.GetVolumeId())))
		}
	}
	return &csi.DeleteVolumeResponse{}, err
}

// NodeStageVolume only attaches. Deferred: whether to mount is known at the publish.
func (d *driver) NodeStageVolume(_ context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	_, device, err := d.check(req.GetVolumeId(), req.GetStagingTargetPath())
	if err == nil && device == "" {
		err = d.free(req.GetVolumeId())
	}
	if err == nil && device == "" {
		_, err = loopdev.Attach(d.image(req.GetVolumeId()), loopdev.Options{})
	}
	return &csi.NodeStageVolumeResponse{}, err
}

func (d *driver) NodeUnstageVolume(_ context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	_, device, err := d.check(req.GetVolumeId(), req.GetStagingTargetPath())
	if err == nil && device != "" {
		err = loopdev.DetachFrom(d.image(req.GetVolumeId()), device)
	}
	return &csi.NodeUnstageVolumeResponse{}, err
}

func (d *driver) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	_, device, err := d.check(req.GetVolumeId(), req.GetTargetPath())
	if err == nil && device == "" {
		err = status.Errorf(codes.FailedPrecondition, "volume %s is not staged", req.GetVolumeId())
	}
	if err != nil {
		return nil, err
	}
	fsType, err := fsTypeOf(req.GetVolumeCapability())
	if err == nil {
		err = d.format(ctx, req.GetVolumeId(), device, fsType)
	}
	if err != nil {
		return nil, err
	}
	flags := slices.Clone(req.GetVolumeCapability().GetMount().GetMountFlags())
	if req.GetReadonly() {
		flags = append(flags, "ro")
	}
	reply := &csi.NodePublishVolumeResponse{}
	if csidefer.Requested(req) { // Deferred: say what to mount. Mount nothing, and create nothing at the target.
		csidefer.Respond(reply, csidefer.Mount{Device: device, FSType: fsType, Flags: flags})
		return reply, nil
	}
	if is, err := d.mounter.IsMountPoint(req.GetTargetPath()); err == nil && is {
		return reply, nil
	}
	return reply, errors.Join(os.MkdirAll(req.GetTargetPath(), 0o750), d.mounter.Mount(device, req.GetTargetPath(), fsType, flags))
}

// format makes the filesystem on a blank device, and never on another one.
func (d *driver) format(ctx context.Context, id, device, fsType string) error {
	marker, err := os.ReadFile(d.marker(id))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	holds := string(marker)
	if err == nil && holds == "" { // an empty marker is one of a driver that was killed
		holds, err = d.mounter.GetDiskFormat(device)
	}
	if err == nil && holds == "" {
		err = checkBlank(device)
	}
	if err == nil && holds == "" {
		holds, err = fsType, mkfs(ctx, device, fsType)
	}
	if err == nil && holds != fsType {
		err = status.Errorf(codes.FailedPrecondition, "volume %s holds %s, not %s", id, holds, fsType)
	}
	if err != nil || len(marker) > 0 {
		return err
	}
	return os.WriteFile(d.marker(id), []byte(holds), 0o600) //nolint:gosec // a path of our own
}

// checkBlank refuses a device that holds something where filesystems begin. "Nothing found" of blkid, which GetDiskFormat
// and FormatAndMount believe, can also mean that it could not read; and mkfs.ext4 without a terminal does not ask.
func checkBlank(device string) error {
	file, err := os.Open(device) //nolint:gosec // a device of our own
	if err != nil {
		return err
	}
	start := make([]byte, 1<<20)
	_, err = io.ReadFull(file, start)
	if err == nil && len(bytes.Trim(start, "\x00")) > 0 {
		err = status.Errorf(codes.FailedPrecondition, "%s holds data that blkid does not know, or an mkfs was interrupted: if it is not wanted, wipe it", device)
	}
	return errors.Join(err, file.Close())
}

// mkfs goes on after the call's deadline: on a large device each repetition would begin anew.
func mkfs(ctx context.Context, device, fsType string) error {
	out, err := exec.CommandContext(context.WithoutCancel(ctx), "mkfs."+fsType, "-q", device).CombinedOutput() //nolint:gosec // one of fileSystems
	if err != nil {
		return status.Errorf(codes.Internal, "mkfs.%s %s: %v: %s", fsType, device, err, out)
	}
	return nil
}

func (d *driver) NodeUnpublishVolume(_ context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	_, _, err := d.check(req.GetVolumeId(), req.GetTargetPath())
	if err == nil && !csidefer.Requested(req) { // Deferred: what is at the target is crust-proxy's.
		err = mount.CleanupMountPoint(req.GetTargetPath(), d.mounter, true)
	}
	return &csi.NodeUnpublishVolumeResponse{}, err
}

// NodeExpandVolume grows the device. Deferred: the filesystem is grown by the sandbox.
func (d *driver) NodeExpandVolume(_ context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	size, device, err := d.check(req.GetVolumeId(), req.GetVolumePath())
	if err == nil {
		err = loopdev.Grow(device)
	}
	if err == nil && !csidefer.Requested(req) {
		_, err = mount.NewResizeFs(d.mounter.Exec).Resize(device, req.GetVolumePath())
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: size}, err
}
