package csidriver

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/disk/superblock"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/reference/conformance"
)

// RunDeferral runs the suite of what docs/driver-authors.md requires of a driver that defers by itself.
func RunDeferral(ctx context.Context, conn grpc.ClientConnInterface, opts Options, onResult func(conformance.Result)) (conformance.Report, error) {
	return run(ctx, conn, opts, deferralSpecs(), newDeferral, onResult)
}

// deferral is a volume that is attached, and published to be deferred.
type deferral struct {
	v      *volume
	target string
	mount  *csiv1.DeferredMount // the first answer
	err    error                // why there is none: reported once
}

var errNoAnswer = fmt.Errorf("%w: \"answer\" did not pass", errSkipped)

const (
	flag   = "noatime"
	secret = "crust-conformance-secret"
)

func newDeferral(ctx context.Context, d *driver) (*deferral, error) {
	access := &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: d.opts.FSType, MountFlags: []string{flag}}},
	}
	v, err := d.volume(ctx, "v", access)
	if err != nil {
		return nil, err
	}
	down, err := v.attach(ctx)
	d.undo = append(d.undo, down...)
	f := &deferral{v: v, target: filepath.Join(d.dir, "target")}
	if err == nil {
		d.undo = append(d.undo, f.unpublish)
		f.mount, f.err = f.publish(ctx, nil)
	}
	return f, err
}

func deferralSpecs() []spec[*deferral] {
	return []spec[*deferral]{
		{"reported", "NodeGetCapabilities reports DEFER_FS_OPS", func(_ context.Context, f *deferral) error {
			if !f.v.d.nodeCan[csi.NodeServiceCapability_RPC_Type(csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS)] {
				return errors.New("it does not")
			}
			return nil
		}},
		{"filesystems", "NodeGetInfo names the filesystem among those that can be deferred, or names none", func(_ context.Context, f *deferral) error {
			has, err := f.fileSystems()
			if err == nil && len(has) > 0 && !slices.Contains(has, f.v.d.opts.FSType) {
				err = fmt.Errorf("it names %v", has)
			}
			return err
		}},
		{"answer", "if asked to defer, NodePublishVolume answers with a device, the filesystem and the flags that were asked for", tryAnswer},
		{"target", "if asked to defer, it creates and mounts nothing at the target", answered(func(_ context.Context, f *deferral) error {
			if _, err := os.Lstat(f.target); err == nil {
				return fmt.Errorf("%s exists", f.target)
			}
			return nil
		})},
		{"not-mounted", "if asked to defer, it mounts the device nowhere on the node", answered(tryNotMounted)},
		{"device", "the answer names a block device, which has the filesystem", answered(tryDevice)},
		{"secrets", "the flags contain no secrets", answered(func(_ context.Context, f *deferral) error {
			if strings.Contains(strings.Join(f.mount.GetMountFlags(), ","), secret) {
				return errors.New("they contain the secret of NodePublishVolume")
			}
			return nil
		})},
		{"repeated", "a repeated publish gives the same answer while another program has the device exclusively, and a mount is at the target", answered(tryRepeated)},
		{"other-fs", "a request for another filesystem than the device has is FAILED_PRECONDITION, and changes nothing", answered(tryOtherFS)},
		{"unknown-fs", "a request for a filesystem that the driver cannot make is INVALID_ARGUMENT", func(ctx context.Context, f *deferral) error {
			return f.wantCode(ctx, "no-such-fs", codes.InvalidArgument)
		}},
		{"grown", "NodeExpandVolume grows the device, and leaves the filesystem alone", answered(tryGrownDevice)},
		{"unpublish", "NodeUnpublishVolume leaves alone what is at the target, and can be repeated", tryUnpublish},
		{"kept", "the next publish finds what the device had", answered(func(ctx context.Context, f *deferral) error {
			return f.unchanged(func() error { _, err := f.publish(ctx, nil); return cmp.Or(err, f.unpublish(ctx)) })
		})},
		{"not-asked", "if not asked to defer, the driver mounts the volume at the target", tryNotAsked},
		{"unstage", "NodeUnstageVolume succeeds after the last unpublish, and can be repeated", func(ctx context.Context, f *deferral) error {
			if !f.v.d.nodeCan[csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME] {
				return errNotReported
			}
			return cmp.Or(f.v.unstage(ctx), f.v.unstage(ctx))
		}},
	}
}

// publish asks to defer. change may change the request.
func (f *deferral) publish(ctx context.Context, change func(*csi.NodePublishVolumeRequest)) (*csiv1.DeferredMount, error) {
	req := proto.CloneOf(f.v.request(f.target))
	req.Secrets = map[string]string{"password": secret}
	csidefer.SetRequested(req)
	if change != nil {
		change(req)
	}
	reply, err := f.v.d.node.NodePublishVolume(ctx, req)
	if err != nil {
		return nil, fmt.Errorf("NodePublishVolume: %w", err)
	}
	mount, given, err := csidefer.DeferredMount(reply)
	if err == nil && !given {
		err = errors.New("NodePublishVolume: the answer has no deferred_mount")
	}
	return mount, err
}

// answered skips what is about an answer that there is not.
func answered(try func(context.Context, *deferral) error) func(context.Context, *deferral) error {
	return func(ctx context.Context, f *deferral) error {
		if f.err != nil {
			return errNoAnswer
		}
		return try(ctx, f)
	}
}

func (f *deferral) unpublish(ctx context.Context) error {
	req := &csi.NodeUnpublishVolumeRequest{VolumeId: f.v.id, TargetPath: f.target}
	csidefer.SetRequested(req)
	_, err := f.v.d.node.NodeUnpublishVolume(ctx, req)
	return err
}

// fileSystems are those that NodeGetInfo names.
func (f *deferral) fileSystems() ([]string, error) {
	fields := &csiv1.NodeGetInfoResponseFields{}
	err := proto.Unmarshal(f.v.d.info.ProtoReflect().GetUnknown(), fields)
	return fields.GetSupportedFileSystems(), err
}

func tryAnswer(_ context.Context, f *deferral) error {
	if f.err != nil {
		return f.err
	}
	m, kind := f.mount, f.mount.GetVolumeType().GetType()
	if kind != runtimev1.VolumeType_BLOCK || m.GetVolumeBackingPath() == "" || m.GetFsType() != f.v.d.opts.FSType || !slices.Contains(m.GetMountFlags(), flag) {
		return fmt.Errorf("type %v, device %q, filesystem %q, flags %q", kind, m.GetVolumeBackingPath(), m.GetFsType(), m.GetMountFlags())
	}
	return nil
}

func tryNotMounted(_ context.Context, f *deferral) error {
	var is unix.Stat_t
	if err := unix.Stat(f.mount.GetVolumeBackingPath(), &is); err != nil {
		return err
	}
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return unix.Mkdev(uint32(m.Major), uint32(m.Minor)) != is.Rdev, false //nolint:gosec // numbers of devices
	})
	if len(mounts) > 0 {
		return fmt.Errorf("it is mounted at %s", mounts[0].Mountpoint)
	}
	return err
}

func tryDevice(_ context.Context, f *deferral) error {
	device, err := f.open(os.O_RDONLY)
	if err != nil {
		return err
	}
	defer func() { _ = device.Close() }()
	info, err := device.Stat()
	if err == nil && (info.Mode()&os.ModeType != os.ModeDevice || !filepath.IsAbs(device.Name())) {
		err = fmt.Errorf("%s is no block device", device.Name())
	}
	if err == nil {
		_, err = superblock.Read(device, f.mount.GetFsType())
	}
	return err
}

func (f *deferral) open(mode int) (*os.File, error) {
	return os.OpenFile(f.mount.GetVolumeBackingPath(), mode, 0)
}

// superblocks has the superblocks of all filesystems that there are.
const superblocks = 128 << 10

// unchanged calls f and checks that the superblocks are what they were.
func (f *deferral) unchanged(do func() error) error {
	read := func() ([]byte, error) {
		device, err := f.open(os.O_RDONLY | unix.O_DIRECT)
		if err != nil {
			return nil, err
		}
		defer func() { _ = device.Close() }()
		raw := make([]byte, superblocks+block)
		_, err = io.ReadFull(device, raw[:superblocks])
		return raw[:superblocks], err
	}
	before, err := read()
	if err == nil {
		err = do()
	}
	if err != nil {
		return err
	}
	after, err := read()
	if err == nil && !bytes.Equal(before, after) {
		err = errors.New("the filesystem on the device has changed")
	}
	return err
}

func tryRepeated(ctx context.Context, f *deferral) error {
	held, err := f.open(os.O_RDWR | unix.O_EXCL)
	if err != nil {
		return fmt.Errorf("nobody may have the device: %w", err)
	}
	defer func() { _ = held.Close() }()
	return f.guarded(func() error {
		again, err := f.publish(ctx, nil)
		if err == nil && !proto.Equal(f.mount, again) {
			err = fmt.Errorf("the answer is %v and was %v", again, f.mount)
		}
		return err
	})
}

// wantCode checks the code of a publish that asks for a filesystem.
func (f *deferral) wantCode(ctx context.Context, fsType string, want ...codes.Code) error {
	_, err := f.publish(ctx, func(req *csi.NodePublishVolumeRequest) { req.GetVolumeCapability().GetMount().FsType = fsType })
	if !slices.Contains(want, status.Code(err)) {
		return fmt.Errorf("asked for %s: %v (%v), and not %v", fsType, status.Code(err), err, want) //nolint:errorlint // it may be nil
	}
	return nil
}

func tryOtherFS(ctx context.Context, f *deferral) error {
	others, err := f.fileSystems()
	if err != nil {
		return err
	}
	wanted := []codes.Code{codes.FailedPrecondition}
	if len(others) == 0 { // the driver may be unable to make either
		others, wanted = []string{"xfs", "ext4"}, append(wanted, codes.InvalidArgument)
	}
	others = slices.DeleteFunc(others, func(name string) bool { return name == f.v.d.opts.FSType })
	if len(others) == 0 {
		return fmt.Errorf("%w: the driver names no other filesystem", errSkipped)
	}
	return f.unchanged(func() error { return f.wantCode(ctx, others[0], wanted...) })
}

func tryGrownDevice(ctx context.Context, f *deferral) error {
	if !f.v.d.able[csi.ControllerServiceCapability_RPC_EXPAND_VOLUME] || !f.v.d.nodeCan[csi.NodeServiceCapability_RPC_EXPAND_VOLUME] {
		return errNotReported
	}
	size := 2 * f.v.capacity
	return f.unchanged(func() error {
		to := &csi.CapacityRange{RequiredBytes: size}
		if _, err := f.v.d.controller.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
			VolumeId: f.v.id, CapacityRange: to, VolumeCapability: f.v.access,
		}); err != nil {
			return fmt.Errorf("ControllerExpandVolume: %w", err)
		}
		req := &csi.NodeExpandVolumeRequest{
			VolumeId: f.v.id, VolumePath: f.target, StagingTargetPath: f.v.staging, CapacityRange: to, VolumeCapability: f.v.access,
		}
		csidefer.SetRequested(req)
		if _, err := f.v.d.node.NodeExpandVolume(ctx, req); err != nil {
			return fmt.Errorf("NodeExpandVolume: %w", err)
		}
		device, err := f.open(os.O_RDONLY)
		if err != nil {
			return err
		}
		defer func() { _ = device.Close() }()
		is, err := device.Seek(0, io.SeekEnd)
		if err == nil && is < size {
			err = fmt.Errorf("the device has %d bytes and should have %d", is, size)
		}
		return err
	})
}

// guarded calls do while a mount is at the target, as crust-proxy's guard is, and checks that it stays.
func (f *deferral) guarded(do func() error) error {
	if err := cmp.Or(os.MkdirAll(f.target, 0o700), unix.Mount("guard", f.target, "tmpfs", 0, "size=4k")); err != nil {
		return err
	}
	defer func() { _, _ = unix.Unmount(f.target, unix.MNT_DETACH), os.Remove(f.target) }()
	if err := do(); err != nil {
		return err
	}
	there, err := mountinfo.Mounted(f.target)
	if err == nil && !there {
		err = errors.New("what was mounted at the target is gone")
	}
	return err
}

func tryUnpublish(ctx context.Context, f *deferral) error {
	return f.guarded(func() error { return cmp.Or(f.unpublish(ctx), f.unpublish(ctx)) })
}

func tryNotAsked(ctx context.Context, f *deferral) error {
	down := func(ctx context.Context) error {
		_, err := f.v.d.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: f.v.id, TargetPath: f.target})
		return err
	}
	f.v.d.undo = append(f.v.d.undo, down) // a publish that fails, or whose deadline passes, may have mounted it
	reply, err := f.v.d.node.NodePublishVolume(ctx, f.v.request(f.target))
	if err != nil {
		return fmt.Errorf("NodePublishVolume: %w", err)
	}
	_, given, err := csidefer.DeferredMount(reply)
	there, _ := mountinfo.Mounted(f.target)
	unpublished := down(ctx)
	if given || !there {
		return fmt.Errorf("the answer has a deferred_mount: %t; the volume is mounted at the target: %t", given, there)
	}
	return cmp.Or(err, unpublished)
}
