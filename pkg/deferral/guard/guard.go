// Package guard resolves target paths and mounts guards on them. A guard is a tmpfs of
// one page that stands in for a volume whose filesystem is mounted in a sandbox: a
// runtime that does not know of deferral gets ENOSPC instead of the node's disk.
package guard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// guardPrefix begins the mount source of every guard, before the volume's key.
	// Runtime handlers find the volume and the sub-directory by it.
	guardPrefix = "crust:"
	// guardNotice is the immutable file that fills the guard.
	guardNotice = "THIS-VOLUME-IS-NOT-MOUNTED-HERE"
	// guardInodes is how many files a guard can hold: the orchestrator makes the sub-directories of volumes in it. The
	// number is fixed, so that nobody can fill the kernel's memory with empty files.
	guardInodes = 1024
	// fsImmutable is FS_IMMUTABLE_FL of the kernel's <linux/fs.h>.
	fsImmutable = 0x10
)

// guardLabel gives all files of a guard one SELinux label, by which any container may read them, and make directories
// as far as modes allow. Without it the container runtime labels each file, and fails at the immutable notice.
var guardLabel = [2]string{"context", "system_u:object_r:container_file_t:s0"}

// Mount mounts the guard if it is missing. If the target directory may be missing too, it is
// made first. An immutable notice takes the guard's only page.
func (t *Target) Mount(parent int, missing bool) (mounted bool, err error) {
	made := false
	if missing {
		err := unix.Mkdirat(parent, t.base, 0o750)
		if made = err == nil; !made && !errors.Is(err, unix.EEXIST) {
			return false, volume.Errorf(volume.DiskKind(err), "volume %s: cannot make the target directory: %w", t.Given, err)
		}
	}
	dir, err := t.openIn(parent)
	if err != nil {
		return false, t.openError(t.Resolved, err)
	}
	defer sys.CloseFD(dir)
	failpoint.Hit("stage-made-target")
	if !made { // a directory that was made now needs no check
		if guarded, err := t.checkFree(dir); err != nil || guarded {
			return false, err
		}
	}
	// The guard is built detached and moved onto the directory as a whole: a kill leaves either all of it or none.
	mount, err := buildGuard(t.Key, t.notice, guardLabel)
	if err != nil {
		return false, t.guardError("made", err)
	}
	defer sys.CloseFD(mount)
	const byFD = unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_EMPTY_PATH
	if err := unix.MoveMount(mount, "", dir, "", byFD); err != nil {
		return false, t.guardError("mounted", err)
	}
	return true, nil
}

// Restore mounts the guard if it is missing, and makes the target directory if that is.
func (t *Target) Restore() (mounted bool, err error) {
	if t.isGuarded() { // as a rule
		return false, nil
	}
	parent, err := t.OpenParent()
	if err != nil {
		return false, err
	}
	defer sys.CloseFD(parent)
	return t.Mount(parent, true)
}

func (t *Target) isGuarded() bool {
	dir, err := sys.OpenBeneath(t.root, t.Rel, unix.O_PATH|unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return false
	}
	defer sys.CloseFD(dir)
	_, ours, err := t.inspect(dir)
	return ours && err == nil
}

// checkFree reports whether the guard is there, and refuses any other mount on the target.
func (t *Target) checkFree(dir int) (guarded bool, err error) {
	occupied, ours, err := t.inspect(dir)
	if err != nil || ours {
		return ours, err
	}
	if occupied {
		return false, volume.Errorf(volume.Conflict, "volume %s: something else is mounted on the target already: "+
			"the filesystem of a deferred volume must not be mounted on the host; unmount it first", t.Given)
	}
	return false, t.refuseFull(dir)
}

// inspect reports whether something is mounted on the target, and whether that is the guard.
func (t *Target) inspect(dir int) (occupied, ours bool, err error) {
	stamp, occupied, err := sys.StampAt(dir, "")
	if err == nil && occupied {
		ours, err = isGuard(dir, t.Key)
	}
	if ours && stamp.Settled() {
		t.Seen = Seen{stamp: stamp, at: time.Now()}
	}
	if err != nil {
		err = t.guardError("examined", err)
	}
	return occupied, ours, err
}

// Remove unmounts the guard with all that is in it, and removes the directory if that is
// ours. It leaves other mounts alone. A target without a guard is a success.
func (t *Target) Remove(directory bool) error {
	parent, err := t.OpenParent()
	if err != nil {
		if kind := volume.KindOf(err); kind == volume.NotFound || kind == volume.Invalid {
			return nil // no directory: no guard can stand there
		}
		return err
	}
	defer sys.CloseFD(parent)
	// A second guard can lie under the first if two processes raced.
	for range 8 {
		none, err := t.removeTop(parent)
		if err != nil {
			return err
		}
		if directory {
			gone, err := t.removeDir(parent)
			if err != nil || gone {
				return err
			}
		}
		if none {
			return nil
		}
	}
	return volume.Errorf(volume.Internal, "volume %s: guard mounts keep coming back on the target", t.Given)
}

func (t *Target) removeTop(parent int) (gone bool, err error) {
	dir, err := t.openIn(parent)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return true, nil // not a directory: not a guard
	case err != nil:
		return false, t.openError(t.Resolved, err)
	}
	defer sys.CloseFD(dir)
	_, ours, err := t.inspect(dir)
	if err != nil || !ours {
		return err == nil, err
	}
	// MNT_DETACH, because our descriptor and bind mounts of sub-directories keep the guard busy.
	const flags = unix.MNT_DETACH | unix.UMOUNT_NOFOLLOW
	if err := unix.Unmount(sys.ProcFD(parent)+"/"+t.base, flags); err != nil && !errors.Is(err, unix.EINVAL) {
		return false, t.guardError("unmounted", err)
	}
	return false, nil
}

// refuseFull refuses a target that holds files: the guard would hide them.
func (t *Target) refuseFull(dir int) error {
	fd, err := sys.OpenBeneath(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return t.openError(t.Resolved, err)
	}
	defer sys.CloseFD(fd)
	buf := make([]byte, 1024)
	n, err := unix.ReadDirent(fd, buf)
	if err != nil {
		return t.openError(t.Resolved, err)
	}
	if _, entries, _ := unix.ParseDirent(buf[:n], -1, nil); entries > 0 {
		return volume.Errorf(volume.Conflict, "volume %s: the target directory is not empty: "+
			"it may hold data that somebody wrote while nothing was mounted; look at it and move it away", t.Given)
	}
	return nil
}

// buildGuard makes the filled tmpfs, mounted nowhere yet: with the label, unless the kernel has no SELinux, or a policy
// that does not know or allow it.
func buildGuard(key volume.Key, notice string, label [2]string) (int, error) {
	if mount, err := buildTmpfs(key, notice, label); err == nil {
		return mount, nil
	}
	return buildTmpfs(key, notice)
}

func buildTmpfs(key volume.Key, notice string, options ...[2]string) (int, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return sys.NoFD, fmt.Errorf("fsopen tmpfs: %w", err)
	}
	defer sys.CloseFD(fs)
	page := os.Getpagesize()
	for _, option := range append(options,
		[2]string{"source", guardPrefix + string(key)},
		[2]string{"size", strconv.Itoa(page)},
		[2]string{"nr_inodes", strconv.Itoa(guardInodes)},
		[2]string{"mode", "0755"},
	) {
		if err := unix.FsconfigSetString(fs, option[0], option[1]); err != nil {
			return sys.NoFD, fmt.Errorf("tmpfs option %s: %w", option[0], err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return sys.NoFD, fmt.Errorf("create tmpfs: %w", err)
	}
	const attrs = unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC
	mount, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attrs)
	if err != nil {
		return sys.NoFD, fmt.Errorf("fsmount: %w", err)
	}
	if err := fillGuard(mount, page, notice+lineOf(key)); err != nil {
		sys.CloseFD(mount)
		return sys.NoFD, err
	}
	return mount, nil
}

// fillGuard writes the notice over the only page and makes it immutable: root in
// a container with the default capabilities can neither remove nor truncate it,
// so the page never comes free. The zeros that fill it are nothing on a terminal.
func fillGuard(mount, page int, text string) error {
	fd, err := unix.Openat(mount, guardNotice, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, 0o444)
	if err != nil {
		return fmt.Errorf("make notice: %w", err)
	}
	defer sys.CloseFD(fd)
	if err := sys.WriteAll(fd, append([]byte(text), make([]byte, page-len(text))...)); err != nil {
		return fmt.Errorf("write notice: %w", err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, fsImmutable); err != nil {
		return fmt.Errorf("make notice immutable: %w", err)
	}
	return nil
}

// lineOf is the line of a notice that names the volume. Another version may have written the rest.
func lineOf(key volume.Key) string { return "volume: " + string(key) + "\n" }

// isGuard recognises a guard by its contents: a tmpfs of one page whose immutable notice
// names the volume. Its mount source would do too, but that is in mountinfo, which lists every
// mount of the node: with many volumes a start would take minutes.
func isGuard(dir int, key volume.Key) (bool, error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(dir, &fs); err != nil {
		return false, err
	}
	if fs.Type != unix.TMPFS_MAGIC || fs.Blocks != 1 {
		return false, nil
	}
	fd, err := unix.Openat(dir, guardNotice, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer sys.CloseFD(fd)
	flags, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS)
	if err != nil || flags&fsImmutable == 0 {
		return false, err
	}
	text := pages.Get().(*[]byte) //nolint:errcheck,forcetypeassert // pages has nothing else
	defer pages.Put(text)
	n, err := unix.Pread(fd, *text, 0)
	if err != nil {
		return false, err
	}
	return n == len(*text) && bytes.Contains(*text, []byte(lineOf(key))), nil
}

// pages are buffers for notices.
var pages = sync.Pool{New: func() any { page := make([]byte, os.Getpagesize()); return &page }}

// Probe checks that the kernel can make a guard. It mounts it nowhere.
func Probe() error {
	mount, err := buildGuard("probe", "", guardLabel)
	sys.CloseFD(mount)
	return err
}

// Mount mounts the guard of a volume on a directory. It is for tests of runtime handlers without the broker.
func Mount(key volume.Key, dir string) error {
	mount, err := buildGuard(key, "", guardLabel)
	if err != nil {
		return err
	}
	defer sys.CloseFD(mount)
	return unix.MoveMount(mount, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

// Points lists where guards of volumes that are not known stand, by volume. Bind mounts of a guard have the
// same source; the guard itself is the one on the target that its source names.
func (r *Root) Points(ctx context.Context, known func(volume.Key) bool) (map[volume.Key]string, error) {
	root, err := sys.OpenDir(r.configured)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil // no root: nothing can be mounted below it
	}
	if err != nil {
		return nil, fmt.Errorf("the root directory %s cannot be opened: %w", r.configured, err)
	}
	defer sys.CloseFD(root)
	resolved, err := sys.PathOfFD(root)
	if err != nil {
		return nil, err
	}
	mounts, err := sys.Mounts(ctx, sys.MountTable, func(line string) bool {
		_, rest, ok := strings.Cut(line, " "+guardPrefix) // no field before the source begins so
		key, _, _ := strings.Cut(rest, " ")
		return ok && !known(volume.Key(key))
	})
	if err != nil {
		return nil, err
	}
	points := make(map[volume.Key]string)
	for _, m := range mounts {
		key, ok := strings.CutPrefix(m.Source, guardPrefix)
		if _, inside := sys.Below(resolved, m.Mountpoint); ok && inside && volume.Key(key) == volume.KeyOf(m.Mountpoint) {
			points[volume.Key(key)] = path.Clean(m.Mountpoint)
		}
	}
	return points, nil
}
