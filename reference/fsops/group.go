package fsops

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

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

// openLevels is how many directories stay open. Those further up are opened again, through
// "..", on the way back, so that a tree may have any depth.
const openLevels = 64

// namesAtOnce is how many names of a directory are read at a time.
const namesAtOnce = 1024

// walk applies a rule to all files below a directory, one directory after another.
type walk struct {
	ctx     context.Context //nolint:containedctx // a walk is one call
	rule    groupRule
	changed int
	levels  []level
}

// level is a directory on the path from the root to the current one.
type level struct {
	dir  *os.File // nil while it is closed
	id   identity
	name string
	todo []string // its subdirectories that are still to be entered
}

// below walks through everything below dir, which stays open. It keeps its path in a list
// and does not recurse, because the workload decides how deep the tree is.
func (w *walk) below(dir *os.File) error {
	defer w.close()
	// A separate descriptor, because levels are closed.
	root, err := openDir(fdOf(dir), ".")
	if err != nil {
		return err
	}
	if err := w.enter(root, ""); err != nil {
		return err
	}
	for len(w.levels) > 0 {
		if err := w.step(); err != nil {
			return err
		}
	}
	return w.ctx.Err()
}

func (w *walk) close() {
	for _, l := range w.levels {
		_ = l.dir.Close() // harmless if it is nil
	}
	w.levels = nil
}

// step enters the next subdirectory, or goes up if none is left.
func (w *walk) step() error {
	top := &w.levels[len(w.levels)-1]
	if len(top.todo) == 0 {
		return w.leave()
	}
	name := top.todo[len(top.todo)-1]
	top.todo = top.todo[:len(top.todo)-1]
	dir, err := openDir(fdOf(top.dir), name)
	if gone(err) {
		return nil
	}
	if err != nil {
		return w.failed(name, err)
	}
	return w.enter(dir, name)
}

func (w *walk) enter(dir *os.File, name string) error {
	id, err := identify(fdOf(dir))
	w.levels = append(w.levels, level{dir: dir, id: id, name: name})
	if err != nil {
		return w.failed("", err)
	}
	if far := len(w.levels) - 1 - openLevels; far >= 0 {
		_ = w.levels[far].dir.Close()
		w.levels[far].dir = nil
	}
	for {
		if err := w.ctx.Err(); err != nil {
			return w.failed("", err)
		}
		names, err := dir.Readdirnames(namesAtOnce)
		for _, entry := range names {
			if err := w.entry(fdOf(dir), entry); err != nil {
				return w.failed(entry, err)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return w.failed("", err)
		}
	}
}

// entry changes one file. It works on a descriptor, so that the file that was examined is
// the one that is changed, whatever gets its name meanwhile.
func (w *walk) entry(dir int, name string) error {
	fd, err := openAt(dir, name, unix.O_PATH)
	if gone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	return w.change(fd, name)
}

// change applies the rule to a file, and adds a directory to those to be entered.
func (w *walk) change(fd int, name string) error {
	isDir, did, err := w.rule.apply(fd)
	if did {
		w.changed++
	}
	if isDir && name != "" {
		top := &w.levels[len(w.levels)-1]
		top.todo = append(top.todo, name)
	}
	return err
}

func (w *walk) leave() error {
	last := len(w.levels) - 1
	below := w.levels[last]
	if last > 0 && w.levels[last-1].dir == nil {
		above, err := openAbove(fdOf(below.dir), w.levels[last-1].id)
		if err != nil {
			return w.failed("", err)
		}
		w.levels[last-1].dir = above
	}
	w.levels = w.levels[:last]
	return below.dir.Close()
}

// openAbove opens the parent directory if it is still the same one.
func openAbove(dir int, want identity) (*os.File, error) {
	fd, err := unix.Openat(dir, "..", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	above := os.NewFile(uintptr(fd), "..")
	is, err := identify(fd)
	if err == nil && is != want {
		err = fmt.Errorf("the directory was moved to another one by somebody else: %w", ErrChanged)
	}
	if err != nil {
		_ = above.Close()
		return nil, err
	}
	return above, nil
}

// gone reports whether an error means that the file was removed or replaced, or that
// another filesystem is mounted on it. Another pod may be using the volume.
func gone(err error) bool {
	return isAny(err, unix.ENOENT, unix.ELOOP, unix.ENOTDIR, unix.EXDEV, unix.ESTALE)
}

// mostPath bounds the path in an error.
const mostPath = 256

// failed adds the path to an error. It is quoted because the workload chose the names.
func (w *walk) failed(name string, err error) error {
	var path strings.Builder
	for _, l := range w.levels {
		if l.name != "" && path.Len() < mostPath {
			path.WriteString(l.name + "/")
		}
	}
	place := path.String() + name
	if len(place) > mostPath {
		place = place[:mostPath] + "..."
	}
	return fmt.Errorf("%q: %w", place, err)
}
