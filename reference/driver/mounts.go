package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
)

// mountAt returns the topmost mount at a path, or nil.
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

// resolve resolves the links in the directory of a path, as mountinfo does. The last element
// may not exist.
func resolve(path string) (string, error) {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if errors.Is(err, fs.ErrNotExist) {
		return filepath.Clean(path), nil
	}
	return filepath.Join(dir, filepath.Base(path)), err
}

// isOf reports whether a mount is of one of the devices: the filesystem on it, or a bind mount
// of its device node.
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

// mountedAt returns the volume's mount at a path, or nil. The error is a foreignError if
// something else is mounted there.
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

// foreignError: something else is mounted at the path of a volume.
type foreignError struct{ volume, path string }

func (e foreignError) Error() string {
	return fmt.Sprintf("volume %q: something else is mounted at %s", e.volume, e.path)
}

// GRPCStatus gives it its code.
func (e foreignError) GRPCStatus() *status.Status {
	return status.New(codes.FailedPrecondition, e.Error())
}

// unmountVolume unmounts all mounts of a volume at a path.
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

// bind mounts a directory or a device node at a target. A read-only mount is never writable
// there, not even if the driver is killed in between.
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

// makeTarget makes the target of a publish, and reports whether it did not exist.
func makeTarget(target string, file bool) (made bool, err error) {
	if file {
		var f *os.File
		f, err = os.OpenFile(target, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600) //nolint:gosec // the caller names the target
		if err == nil {
			err = f.Close()
		}
	} else {
		err = os.Mkdir(target, 0o750)
	}
	if errors.Is(err, fs.ErrExist) {
		return false, nil
	}
	return err == nil, err
}

// removeTarget removes an empty target, if it exists.
func removeTarget(target string) error {
	if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the target: %w", err)
	}
	return nil
}
