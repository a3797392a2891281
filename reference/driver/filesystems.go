package driver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"k8s.io/mount-utils"
	utilexec "k8s.io/utils/exec"

	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

// filesystems makes, mounts and grows the filesystems of volumes.
type filesystems struct {
	pool      *pool
	formatter *mkfs.Formatter
	mounter   *mount.SafeFormatAndMount
	resizer   *mount.ResizeFs
}

func newFilesystems(disks *pool) *filesystems {
	formatter := mkfs.New(mkfs.Config{Log: disks.log, LockFile: filepath.Join(disks.config.DataDir, "format.lock")})
	return &filesystems{
		pool: disks, formatter: formatter, mounter: mount.NewSafeFormatAndMount(mount.New(""), utilexec.New()),
		resizer: mount.NewResizeFs(utilexec.New()),
	}
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

// mountFS mounts a volume's filesystem, which it makes if the device is blank, and grows it to
// the device.
func (f *filesystems) mountFS(ctx context.Context, id, device, path string, want access) error {
	m, err := f.pool.mountedAt(id, path)
	if err == nil && m == nil {
		err = f.mountNew(ctx, id, device, path, want)
	}
	if err != nil || want.readOnly {
		return err
	}
	err = f.growFS(id, device, path)
	if m != nil && err != nil {
		// Growing was repeated in case the driver was killed before it had. A pod that has the
		// volume already must not fail for it.
		f.pool.log.Warn("a mounted filesystem does not grow", zap.String("volume", id), zap.Error(err))
		return nil
	}
	return err
}

func (f *filesystems) mountNew(ctx context.Context, id, device, path string, want access) error {
	if err := f.makeFS(ctx, id, device, want); err != nil {
		return err
	}
	if !want.readOnly {
		if err := fsops.GrowUnmounted(ctx, device, want.fsType); err != nil {
			return fmt.Errorf("volume %q: %w", id, err)
		}
	}
	if err := os.MkdirAll(path, 0o750); err != nil {
		return err
	}
	if err := fsops.Forget(device, want.fsType); err != nil {
		return fmt.Errorf("volume %q: %w", id, err)
	}
	var options []string
	if want.readOnly {
		options = append(options, "ro")
	}
	if want.fsType == "xfs" {
		options = append(options, sharedUUID)
	}
	// Passed as sensitive options, the flags do not appear in errors.
	if err := f.mounter.FormatAndMountSensitive(device, path, want.fsType, options, want.flags); err != nil {
		return fmt.Errorf("volume %q: mount %s at %s: %w", id, want.fsType, path, err)
	}
	failpoint.Hit("driver-mounted")
	return nil
}

func (f *filesystems) growFS(id, device, path string) error {
	need, err := f.resizer.NeedResize(device, path)
	if err == nil && need {
		_, err = f.resizer.Resize(device, path)
	}
	if err != nil {
		return fmt.Errorf("volume %q: grow its filesystem: %w", id, err)
	}
	return nil
}

// makeFS makes the filesystem if the device is blank.
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
