package fsops

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// ApplyGroup changes the group of root and of everything below it, as kubelet does: the group owns each file and may
// read and write it; directories can be entered and pass their group on. With GroupOnMismatch nothing changes if the
// root directory is already as it should be. ApplyGroup returns how many files it has changed.
//
// Links get the group and are never followed; other mounts are not entered. A file that cannot be changed (chattr +i, a
// read-only subvolume of btrfs) stays as it is. The root directory gets the group last and fits no group until then:
// after a walk that was killed, or ended by ctx, GroupOnMismatch starts again, whichever group it is for.
func ApplyGroup(ctx context.Context, root int, gid uint32, policy volume.GroupPolicy) (changed int, err error) {
	w := walk{ctx: ctx, gid: gid}
	dir, err := openDir(root, ".")
	if err != nil {
		return 0, fmt.Errorf("give the volume to group %d: open its root directory: %w", gid, err)
	}
	defer func() { _ = dir.Close() }()
	var st unix.Stat_t
	if err := unix.Fstat(fdOf(dir), &st); err != nil {
		return 0, fmt.Errorf("give the volume to group %d: look at its root directory: %w", gid, err)
	}
	fits := st.Mode&needs(&st) == needs(&st)
	if fits && st.Gid == gid && policy == volume.GroupOnMismatch {
		return 0, nil
	}
	if fits && st.Gid != gid { // a walk that is killed leaves files of both groups
		err := unix.Fchmod(fdOf(dir), st.Mode&0o7777&^unix.S_ISGID)
		if err := excuse(fdOf(dir), err); err != nil {
			return 0, fmt.Errorf("give the volume to group %d: its root directory: %w", gid, err)
		}
	}
	if err := w.below(dir); err != nil {
		return w.changed, fmt.Errorf("give the volume to group %d: %w", gid, err)
	}
	if _, err := w.change(fdOf(dir)); err != nil {
		return w.changed, fmt.Errorf("give the volume to group %d: its root directory: %w", gid, err)
	}
	return w.changed, nil
}

// needs returns the permissions that a file must have in addition to its own.
func needs(st *unix.Stat_t) uint32 {
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return 0o770 | unix.S_ISGID
	}
	return 0o660
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

// openLevels is how many directories stay open. Those further up are opened again, through "..", on the way back.
const openLevels = 64

// mostLevels bounds the depth of a tree: each level takes memory, of the kernel too.
const mostLevels = 100_000

// entriesAtOnce is how many bytes of a directory's entries are read at a time.
const entriesAtOnce = 32 << 10

// walk gives all files below a directory to a group. It goes down into each directory as
// soon as it meets it: the names that it keeps are bounded, whatever the tree is like.
type walk struct {
	ctx     context.Context //nolint:containedctx // a walk is one call
	gid     uint32
	changed int
	levels  []level
	buf     []byte
}

// level is a directory on the path from the root to the current one.
type level struct {
	dir  *os.File // nil while it is closed
	id   identity
	name string
	// entries is what was read of the directory and is still to be changed. A closed directory has none.
	entries []byte
	// next is the offset after the last file that was changed; resumed is where it went on after it was opened again.
	next, resumed int64
}

// below walks through everything below dir. It does not recurse: the workload decides how deep the tree is.
func (w *walk) below(dir *os.File) error {
	defer w.close()
	// A separate descriptor, because levels are closed.
	root, err := openDir(fdOf(dir), ".")
	if err != nil {
		return err
	}
	w.buf = make([]byte, entriesAtOnce)
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

// step changes the next file of the current directory, and enters it if it is one itself. If there is none, it goes up.
func (w *walk) step() error {
	top := &w.levels[len(w.levels)-1]
	if len(top.entries) == 0 {
		return w.read(top)
	}
	size := binary.NativeEndian.Uint16(top.entries[16:]) // a struct linux_dirent64
	text, _, _ := bytes.Cut(top.entries[19:size], []byte{0})
	name := string(text)
	top.next = int64(binary.NativeEndian.Uint64(top.entries[8:])) //nolint:gosec // an offset
	top.entries = top.entries[size:]
	if name == "." || name == ".." {
		return nil
	}
	if top.next <= top.resumed { // or it would be entered again and again
		return w.failed(name, errors.New("its directory has two entries at one offset"))
	}
	dir, err := w.entry(fdOf(top.dir), name)
	if err != nil {
		return w.failed(name, err)
	}
	if dir == nil {
		return nil
	}
	return w.enter(dir, name)
}

// read reads the next entries of a directory, and goes up after the last one.
func (w *walk) read(top *level) error {
	if err := w.ctx.Err(); err != nil {
		return w.failed("", err)
	}
	n, err := unix.Getdents(fdOf(top.dir), w.buf)
	if err != nil && !gone(err) {
		return w.failed("", err)
	}
	if n <= 0 {
		return w.leave()
	}
	top.entries = bytes.Clone(w.buf[:n])
	return nil
}

func (w *walk) enter(dir *os.File, name string) error {
	id, err := identify(fdOf(dir))
	w.levels = append(w.levels, level{dir: dir, id: id, name: name})
	if err == nil && len(w.levels) > mostLevels {
		err = fmt.Errorf("it lies more than %d directories deep", mostLevels)
	}
	if err != nil {
		return w.failed("", err)
	}
	if far := len(w.levels) - 1 - openLevels; far >= 0 {
		_ = w.levels[far].dir.Close()
		w.levels[far].dir, w.levels[far].entries = nil, nil
	}
	return nil
}

// entry changes one file, and opens it if it is a directory. It works on a descriptor, so that the file that was
// examined is the one that is changed, whatever gets its name meanwhile.
func (w *walk) entry(dir int, name string) (*os.File, error) {
	fd, err := openAt(dir, name, unix.O_PATH)
	if gone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	isDir, err := w.change(fd)
	if err != nil || !isDir {
		return nil, err
	}
	below, err := openDir(fd, ".")
	if gone(err) {
		return nil, nil
	}
	return below, err
}

// change gives a file to the group, and reports whether it is a directory.
func (w *walk) change(fd int) (isDir bool, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false, err
	}
	kind, mode := st.Mode&unix.S_IFMT, st.Mode&0o7777
	isDir = kind == unix.S_IFDIR
	changed := st.Gid != w.gid
	if changed {
		if err := unix.Fchownat(fd, "", -1, int(w.gid), unix.AT_EMPTY_PATH); err != nil {
			return isDir, excuse(fd, err)
		}
	}
	want := mode | needs(&st)
	// The kernel clears setuid and setgid when the group changes: set them again.
	dropped := changed && !isDir && mode&(unix.S_ISUID|unix.S_ISGID) != 0
	if kind != unix.S_IFLNK && (want != mode || dropped) {
		err = chmod(fd, want)
		changed = changed || err == nil
	}
	if changed {
		w.changed++
	}
	return isDir, excuse(fd, err)
}

func (w *walk) leave() error {
	last := len(w.levels) - 1
	below := w.levels[last]
	if last > 0 && w.levels[last-1].dir == nil {
		if err := w.levels[last-1].reopen(fdOf(below.dir)); err != nil {
			return w.failed("", err)
		}
	}
	w.levels = w.levels[:last]
	return below.dir.Close()
}

// reopen opens a closed directory from one below it, to go on after the entry that was the last one changed.
func (l *level) reopen(below int) error {
	fd, err := unix.Openat(below, "..", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	l.dir, l.resumed = os.NewFile(uintptr(fd), ".."), l.next
	is, err := identify(fd)
	if err == nil && is != l.id {
		err = fmt.Errorf("the directory was moved to another one by somebody else: %w", ErrChanged)
	}
	if err == nil {
		_, err = unix.Seek(fd, l.next, io.SeekStart)
	}
	return err
}

// gone reports whether a file was removed, replaced or mounted on meanwhile: another pod may be using the volume.
func gone(err error) bool {
	return isAny(err, unix.ENOENT, unix.ELOOP, unix.ENOTDIR, unix.EXDEV, unix.ESTALE)
}

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
