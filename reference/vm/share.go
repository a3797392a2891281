package vm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// share is the tree of the host that the guest sees. Its directories are made in one
// place and shown read-only in another one, on which the mounts lie: what the guest may
// write to are the mounts alone.
type share struct{ made, shown string }

// of is what a container is shown.
func (s share) of(container string) string { return filepath.Join(s.shown, container) }

// open makes the tree. What is mounted in it later reaches the server of the guest's
// filesystem, and nobody else.
func (s share) open() error {
	for _, dir := range []string{s.made, s.shown} {
		if err := os.Mkdir(dir, 0o755); err != nil { //nolint:gosec // below a directory of root's
			return err
		}
	}
	tree, err := unix.OpenTree(unix.AT_FDCWD, s.made, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return err
	}
	defer sys.CloseFD(tree)
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &unix.MountAttr{
		Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV, Propagation: unix.MS_PRIVATE,
	}); err != nil {
		return err
	}
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, s.shown, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return err
	}
	return unix.MountSetattr(unix.AT_FDCWD, s.shown, 0, &unix.MountAttr{Propagation: unix.MS_SHARED})
}

// bind shows a file or a directory of the host under a name.
type bind struct {
	name, source        string
	destination         string // in the container, or empty for its root filesystem
	readOnly, recursive bool   // recursively read-only
	follows             bool   // what is mounted in it later is seen, too
	noLinks             bool   // nobody can follow a symbolic link in it
}

// add mounts it.
func (s share) add(b bind) error {
	attr := unix.MountAttr{Propagation: unix.MS_PRIVATE}
	if b.follows {
		attr.Propagation = unix.MS_SLAVE
	}
	tree, err := unix.OpenTree(unix.AT_FDCWD, b.source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return fmt.Errorf("%s cannot be shown to the guest: %w", b.source, err)
	}
	defer sys.CloseFD(tree)
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		return err
	}
	if b.noLinks {
		if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSYMFOLLOW}); err != nil {
			return err
		}
	}
	if b.readOnly {
		flags := uint(unix.AT_EMPTY_PATH)
		if b.recursive {
			flags |= unix.AT_RECURSIVE
		}
		if err := unix.MountSetattr(tree, "", flags, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return err
		}
	}
	if err := s.point(tree, filepath.Join(s.made, b.name)); err != nil {
		return err
	}
	return unix.MoveMount(tree, "", unix.AT_FDCWD, filepath.Join(s.shown, b.name), unix.MOVE_MOUNT_F_EMPTY_PATH)
}

// point makes what a mount can lie on.
func (s share) point(tree int, path string) error {
	var st unix.Stat_t
	if err := unix.Fstat(tree, &st); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { //nolint:gosec // below a directory of root's
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return os.Mkdir(path, 0o755) //nolint:gosec // as above
	}
	return os.WriteFile(path, nil, 0o644) //nolint:gosec // as above
}

// remove takes back what a container was shown. No directory is removed that something
// is mounted in.
func (s share) remove(container string) error {
	names, err := filepath.Glob(filepath.Join(s.made, container, "*"))
	if err != nil {
		return err
	}
	for _, made := range names {
		if err := unmount(filepath.Join(s.of(container), filepath.Base(made))); err != nil {
			return err
		}
	}
	return remove(append(names, filepath.Join(s.made, container))...)
}

// close takes all of it back.
func (s share) close() error {
	if err := unmount(s.shown); err != nil {
		return err
	}
	containers, err := filepath.Glob(filepath.Join(s.made, "*"))
	if err != nil {
		return err
	}
	for _, dir := range containers {
		if err := s.remove(filepath.Base(dir)); err != nil {
			return err
		}
	}
	return remove(s.shown, s.made)
}

func unmount(path string) error {
	err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("%s cannot be unmounted: %w", path, err)
	}
	return nil
}

// remove removes files and empty directories, up to the first that it cannot. What is not
// there is removed.
func remove(paths ...string) error {
	for _, path := range paths {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// bindOf says how a mount of a container is shown to the guest.
func bindOf(name string, m specs.Mount) bind {
	has := func(options ...string) bool {
		return slices.ContainsFunc(options, func(o string) bool { return slices.Contains(m.Options, o) })
	}
	return bind{
		name: name, source: m.Source, destination: m.Destination, readOnly: has("ro", "rro"), recursive: has("rro"),
		follows: has("rslave", "slave", "rshared", "shared"),
	}
}
