package fsops

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// ApplyGroup changes the group of root and of everything below it, as kubelet does: the
// group owns each file and may read and write it; directories can be entered and pass
// their group on. With GroupOnMismatch nothing changes if the root directory is already as
// it should be. ApplyGroup returns how many files it has changed.
//
// Links get the group and are never followed; other mounts are not entered. A file that
// cannot be changed (chattr +i, a read-only subvolume of btrfs) stays as it is. The root
// directory gets the group last and fits no group until then: after a walk that was
// killed, or ended by ctx, GroupOnMismatch starts again, whichever group it is for.
func ApplyGroup(ctx context.Context, root int, gid uint32, policy volume.GroupPolicy) (changed int, err error) {
	w := walk{ctx: ctx, rule: groupRule{gid: gid}}
	dir, err := openDir(root, ".")
	if err != nil {
		return 0, fmt.Errorf("give the volume to group %d: open its root directory: %w", gid, err)
	}
	defer func() { _ = dir.Close() }()
	if policy == volume.GroupOnMismatch {
		if fits, err := w.rule.fits(fdOf(dir)); fits || err != nil {
			return 0, err
		}
	}
	if err := w.rule.unfit(fdOf(dir)); err != nil {
		return 0, fmt.Errorf("give the volume to group %d: its root directory: %w", gid, err)
	}
	if err := w.below(dir); err != nil {
		return w.changed, fmt.Errorf("give the volume to group %d: %w", gid, err)
	}
	if err := w.change(fdOf(dir), ""); err != nil {
		return w.changed, fmt.Errorf("give the volume to group %d: its root directory: %w", gid, err)
	}
	return w.changed, nil
}

// groupRule says how each file has to be.
type groupRule struct{ gid uint32 }

// needs returns the permissions that a file must have in addition to its own.
func needs(st *unix.Stat_t) uint32 {
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return 0o770 | unix.S_ISGID
	}
	return 0o660
}

// fits reports whether the root directory is as ApplyGroup leaves it.
func (r groupRule) fits(root int) (bool, error) {
	var st unix.Stat_t
	if err := unix.Fstat(root, &st); err != nil {
		return false, fmt.Errorf("give the volume to group %d: look at its root directory: %w", r.gid, err)
	}
	want := needs(&st)
	return st.Gid == r.gid && st.Mode&want == want, nil
}

// unfit clears the setgid bit of a root directory that fits another group: a walk that is
// killed leaves files of both groups.
func (r groupRule) unfit(root int) error {
	var st unix.Stat_t
	if err := unix.Fstat(root, &st); err != nil {
		return err
	}
	want := needs(&st)
	if st.Gid == r.gid || st.Mode&want != want {
		return nil
	}
	if err := unix.Fchmod(root, st.Mode&0o7777&^unix.S_ISGID); err != nil {
		return excuse(root, err)
	}
	return nil
}

// apply changes one file to be as the rule says. It reports whether the file is a
// directory, and whether anything had to be changed.
func (r groupRule) apply(fd int) (isDir, did bool, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false, false, err
	}
	kind, mode := st.Mode&unix.S_IFMT, st.Mode&0o7777
	isDir = kind == unix.S_IFDIR
	given := st.Gid != r.gid
	if given {
		if err := unix.Fchownat(fd, "", -1, int(r.gid), unix.AT_EMPTY_PATH); err != nil {
			return isDir, false, excuse(fd, err)
		}
	}
	if kind == unix.S_IFLNK {
		return false, given, nil
	}
	want := mode | needs(&st)
	// The kernel clears setuid and setgid when the group changes: set them again.
	dropped := given && !isDir && mode&(unix.S_ISUID|unix.S_ISGID) != 0
	if want == mode && !dropped {
		return isDir, given, nil
	}
	if err := chmod(fd, want); err != nil {
		return isDir, given, excuse(fd, err)
	}
	return isDir, true, nil
}

// excuse ignores the error if the file cannot be changed by anybody.
func excuse(fd int, err error) error {
	if errors.Is(err, unix.EPERM) && isFixed(fd) || errors.Is(err, unix.EROFS) && inReadOnlySubvolume(fd) {
		return nil
	}
	return err
}

// isFixed reports whether a file is immutable or append-only.
func isFixed(fd int) bool {
	const fixed = unix.STATX_ATTR_IMMUTABLE | unix.STATX_ATTR_APPEND
	var st unix.Statx_t
	return unix.Statx(fd, "", unix.AT_EMPTY_PATH, 0, &st) == nil && st.Attributes&fixed != 0
}

// inReadOnlySubvolume reports, of a file that could not be changed with EROFS, whether that
// is because of its subvolume: the filesystem and its mount can be written to.
func inReadOnlySubvolume(fd int) bool {
	var fs unix.Statfs_t
	return unix.Fstatfs(fd, &fs) == nil && fs.Type == unix.BTRFS_SUPER_MAGIC && fs.Flags&unix.ST_RDONLY == 0
}

// chmod changes the mode of an open file. The descriptor may be an O_PATH one.
func chmod(fd int, mode uint32) error {
	err := unix.Fchmodat(fd, "", mode, unix.AT_EMPTY_PATH)
	if errors.Is(err, unix.EOPNOTSUPP) { // before Linux 6.6
		return unix.Chmod("/proc/self/fd/"+strconv.Itoa(fd), mode)
	}
	return err
}
