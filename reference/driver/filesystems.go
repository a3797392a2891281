package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/mount-utils"

	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
)

type filesystems struct {
	pool      *pool
	formatter *mkfs.Formatter
	mounter   mount.Interface
	// mayGrowMounted reports whether this process may grow a mounted ext4.
	mayGrowMounted func() bool
}

// sharedUUID lets an xfs be mounted beside its clone or original, which has the same UUID.
// ext4 needs nothing of the kind; Linux refuses such a btrfs before 6.7.
const sharedUUID = "nouuid"

// growMounted grows the filesystem if it is mounted for writing on this node.
func (f *filesystems) growMounted(id, path string) error {
	m, err := f.pool.mountedAt(id, path)
	if err != nil || m == nil {
		return err
	}
	if slices.Contains(strings.Split(m.VFSOptions, ","), "ro") {
		return nil
	}
	return f.growFS(id, m.Source, path)
}

// mountFS mounts a volume's filesystem, which it makes if the device is blank, and grows it to the device.
func (f *filesystems) mountFS(ctx context.Context, id, device, path string, want access) error {
	m, err := f.pool.mountedAt(id, path)
	if err == nil && m == nil {
		err = f.mountNew(ctx, id, device, path, want)
	}
	if err != nil || want.readsOnly() {
		return err
	}
	err = f.growFS(id, device, path)
	if m != nil && err != nil {
		// It is repeated in case the driver was killed before. A pod that has the volume already must not fail for it.
		f.pool.log.Warn("a mounted filesystem does not grow", zap.String("volume", id), zap.Error(err))
		return nil
	}
	return err
}

func (f *filesystems) mountNew(ctx context.Context, id, device, path string, want access) error {
	if err := f.makeFS(ctx, id, device, want); err != nil {
		return err
	}
	if !want.readsOnly() {
		if err := f.growUnmounted(ctx, id, device, want.fsType); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(path, 0o750); err != nil {
		return err
	}
	if err := fsops.Forget(device, want.fsType); err != nil {
		return fmt.Errorf("volume %q: %w", id, err)
	}
	options := []string{"defaults"}
	if want.readOnly {
		options = append(options, "ro")
	}
	if want.fsType == "xfs" {
		options = append(options, sharedUUID)
	}
	// Not FormatAndMountSensitive, which formats by force what blkid does not recognize: only makeFS formats.
	// Passed as sensitive options, the flags do not appear in errors.
	if err := f.mounter.MountSensitive(device, path, want.fsType, options, want.flags); err != nil {
		return fmt.Errorf("volume %q: mount %s at %s: %w", id, want.fsType, path, err)
	}
	failpoint.Hit("driver-mounted")
	return nil
}

// growUnmounted grows an ext4 before its mount, where this process may not grow it afterwards. If resize2fs is killed,
// say with the driver's container, the filesystem may be lost. The kernel grows a mounted one so that it survives a kill.
func (f *filesystems) growUnmounted(ctx context.Context, id, device, fsType string) error {
	if f.mayGrowMounted() {
		return nil
	}
	if err := fsops.GrowUnmounted(ctx, device, fsType); err != nil {
		return fmt.Errorf("volume %q: %w", id, err)
	}
	return nil
}

func (f *filesystems) growFS(id, device, path string) error {
	root, noRoot := sys.OpenDir(path)
	defer sys.CloseFD(root)
	disk, noDisk := unix.Open(device, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	defer sys.CloseFD(disk)
	err := errors.Join(noRoot, noDisk)
	if err == nil {
		_, err = fsops.Grow(root, disk, 0, 0)
	}
	if err != nil {
		return fmt.Errorf("volume %q: grow its filesystem: %w", id, err)
	}
	return nil
}

func (f *filesystems) makeFS(ctx context.Context, id, device string, want access) error {
	fd, err := unix.Open(device, unix.O_PATH|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return fmt.Errorf("volume %q: open %s: %w", id, device, err)
	}
	defer func() { _ = unix.Close(fd) }()
	_, err = f.formatter.Prepare(ctx, mkfs.Request{
		Device: fd, Volume: id, Path: device, FSType: want.fsType, Policy: volume.FormatHost, ReadOnly: want.readOnly,
	})
	return err
}

func mountAt(path string) (*mountinfo.Info, error) {
	path, err := resolve(path)
	if err != nil {
		return nil, err
	}
	found, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return m.Mountpoint != path, false })
	if err != nil || len(found) == 0 {
		return nil, err
	}
	return found[len(found)-1], nil
}

// resolve resolves the links in the directory of a path, as mountinfo does. The last element may not exist.
func resolve(path string) (string, error) {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if errors.Is(err, fs.ErrNotExist) {
		return filepath.Clean(path), nil
	}
	return filepath.Join(dir, filepath.Base(path)), err
}

// isOf reports whether a mount is of one of the devices: the filesystem on it, or a bind mount of its device node.
func isOf(m *mountinfo.Info, devices []loopdev.Attached) bool {
	var node unix.Stat_t
	statErr := unix.Stat(m.Mountpoint, &node)
	for _, one := range devices {
		if m.Source == one.Path {
			return true
		}
		var device unix.Stat_t
		if statErr == nil && node.Mode&unix.S_IFMT == unix.S_IFBLK && unix.Stat(one.Path, &device) == nil && device.Rdev == node.Rdev {
			return true
		}
	}
	return false
}

// mountedAt returns the volume's mount at a path, or nil. It is a foreignError if something else is mounted there.
func (l *pool) mountedAt(id, path string) (*mountinfo.Info, error) {
	m, err := mountAt(path)
	if err != nil || m == nil {
		return nil, err
	}
	devices, err := l.attached(id)
	if err != nil {
		return nil, err
	}
	if !isOf(m, devices) {
		return nil, foreignError{volume: id, path: path}
	}
	return m, nil
}

type foreignError struct{ volume, path string }

func (e foreignError) Error() string {
	return fmt.Sprintf("volume %q: something else is mounted at %s", e.volume, e.path)
}

func (e foreignError) GRPCStatus() *status.Status {
	return status.New(codes.FailedPrecondition, e.Error())
}

func (l *pool) unmountVolume(id, path string) error {
	for {
		m, err := l.mountedAt(id, path)
		if err != nil || m == nil {
			return err
		}
		if err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("volume %q: unmount %s: %w", id, path, err)
		}
	}
}

// bind mounts a directory or a device node at a target. A read-only mount is never writable there, whatever is killed.
func bind(source, target string, readOnly bool) error {
	mount, err := unix.OpenTree(unix.AT_FDCWD, source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("bind %s: %w", source, err)
	}
	defer func() { _ = unix.Close(mount) }() // unmounts it unless it was moved
	if readOnly {
		if err := unix.MountSetattr(mount, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return fmt.Errorf("make the mount at %s read-only: %w", target, err)
		}
	}
	failpoint.Hit("driver-bind-made")
	if err := unix.MoveMount(mount, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("bind to %s: %w", target, err)
	}
	return nil
}
