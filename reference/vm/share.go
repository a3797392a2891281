package vm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// share is the directory tree of the host that the guest sees. Its directories are created in
// tree; mount is a read-only bind mount of tree, in which root filesystems and ordinary mounts
// are mounted. So the guest can write to those mounts alone.
type share struct{ tree, mount string }

func (s share) path(container string) string { return filepath.Join(s.mount, container) }

// open creates the tree. Mounts that are added later propagate to virtiofsd, and to nobody else.
func (s share) open() error {
	for _, dir := range []string{s.tree, s.mount} {
		if err := os.Mkdir(dir, 0o755); err != nil { //nolint:gosec // only root can enter the directory above
			return err
		}
	}
	clone, err := unix.OpenTree(unix.AT_FDCWD, s.tree, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return err
	}
	defer sys.CloseFD(clone)
	if err := unix.MountSetattr(clone, "", unix.AT_EMPTY_PATH, &unix.MountAttr{
		Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV, Propagation: unix.MS_PRIVATE,
	}); err != nil {
		return err
	}
	if err := unix.MoveMount(clone, "", unix.AT_FDCWD, s.mount, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return err
	}
	// In a directory that is shared, such as /run, it has become a peer of copies in other namespaces.
	for _, propagation := range []uint64{unix.MS_PRIVATE, unix.MS_SHARED} {
		if err := unix.MountSetattr(unix.AT_FDCWD, s.mount, 0, &unix.MountAttr{Propagation: propagation}); err != nil {
			return err
		}
	}
	return nil
}

// bind is a file or a directory of the host that the guest sees under name.
type bind struct {
	name, source        string
	readOnly, recursive bool // recursive: mounts below it are read-only, too
	slave               bool // later mounts below the source appear in it
}

func (s share) add(b bind) error {
	clone, err := unix.OpenTree(unix.AT_FDCWD, b.source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return fmt.Errorf("%s cannot be shown to the guest: %w", b.source, err)
	}
	defer sys.CloseFD(clone)
	attr := unix.MountAttr{Propagation: unix.MS_PRIVATE}
	if b.slave {
		attr.Propagation = unix.MS_SLAVE
	}
	if err := unix.MountSetattr(clone, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		return err
	}
	if b.readOnly {
		flags := uint(unix.AT_EMPTY_PATH)
		if b.recursive {
			flags |= unix.AT_RECURSIVE
		}
		if err := unix.MountSetattr(clone, "", flags, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return err
		}
	}
	if err := createMountPoint(clone, filepath.Join(s.tree, b.name)); err != nil {
		return err
	}
	return unix.MoveMount(clone, "", unix.AT_FDCWD, filepath.Join(s.mount, b.name), unix.MOVE_MOUNT_F_EMPTY_PATH)
}

// createMountPoint creates a file or a directory, as the mount is one.
func createMountPoint(mount int, path string) error {
	var st unix.Stat_t
	if err := unix.Fstat(mount, &st); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { //nolint:gosec // only root can enter the directory above
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return os.Mkdir(path, 0o755) //nolint:gosec // as above
	}
	return os.WriteFile(path, nil, 0o644) //nolint:gosec // as above
}

// remove unmounts what a container had. It removes no directory in which something is still mounted.
func (s share) remove(container string) error {
	names, err := filepath.Glob(filepath.Join(s.tree, container, "*"))
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := unmount(filepath.Join(s.path(container), filepath.Base(name))); err != nil {
			return err
		}
	}
	return remove(append(names, filepath.Join(s.tree, container))...)
}

// close removes the whole tree.
func (s share) close() error {
	if err := unmount(s.mount); err != nil {
		return err
	}
	containers, err := filepath.Glob(filepath.Join(s.tree, "*"))
	if err != nil {
		return err
	}
	for _, dir := range containers {
		if err := s.remove(filepath.Base(dir)); err != nil {
			return err
		}
	}
	return remove(s.mount, s.tree)
}

func unmount(path string) error {
	err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("%s cannot be unmounted: %w", path, err)
	}
	return nil
}

// remove removes files and empty directories, up to the first that cannot be removed. A path
// that does not exist is no error.
func remove(paths ...string) error {
	for _, path := range paths {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}
