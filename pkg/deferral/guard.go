package deferral

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// guardPrefix begins the mount source of every guard; the volume's key
	// follows. Runtime handlers find volume and sub-directory by it.
	guardPrefix = "crust:"
	// guardNotice is the immutable file that fills the guard.
	guardNotice = "THIS-VOLUME-IS-NOT-MOUNTED-HERE"
	// guardInodes is how many files a guard can hold: kubelet makes the
	// directories of subPaths in it. A fixed number, so that nobody can fill the
	// kernel's memory with empty files.
	guardInodes = 1024
	// fsImmutable is FS_IMMUTABLE_FL of the kernel's <linux/fs.h>.
	fsImmutable = 0x10
)

// guards makes and removes the guard mounts: a tmpfs of one page on each
// target, its page taken by an immutable notice. Whoever runs a pod on the bare
// target gets ENOSPC instead of writing to the node's disk.
type guards struct {
	mu sync.Mutex
	// mounts holds the kernel's unique id of each guard made by this process: a
	// guard that is recognised by it needs no further look.
	mounts map[Key]uint64
}

// put makes the guard stand on the target. The mount is built detached and
// moved into place as a whole: a kill leaves either all of it or none.
func (g *guards) put(t *target, dir int) error {
	here, err := statMount(dir)
	if err != nil {
		return t.guardError("looked at", err)
	}
	if here.isRoot {
		return g.checkMounted(t, dir, here)
	}
	if err := refuseFull(t, dir); err != nil {
		return err
	}
	return g.mount(t, dir)
}

// mount builds the guard and moves it onto the directory.
func (g *guards) mount(t *target, dir int) error {
	mount, err := buildGuard(t.key())
	if err != nil {
		return t.guardError("made", err)
	}
	defer closeFD(mount)
	const byFD = unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_EMPTY_PATH
	if err := unix.MoveMount(mount, "", dir, "", byFD); err != nil {
		return t.guardError("mounted", err)
	}
	return g.remember(t, mount)
}

func (g *guards) remember(t *target, mount int) error {
	made, err := statMount(mount)
	if err != nil {
		return t.guardError("looked at", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.mounts == nil {
		g.mounts = make(map[Key]uint64)
	}
	g.mounts[t.key()] = made.id
	return nil
}

// stands tells whether the guard is what is mounted on the target.
func (g *guards) stands(t *target, dir int) (bool, error) {
	here, err := statMount(dir)
	if err != nil || !here.isRoot {
		return false, err
	}
	return g.isOurs(t, dir, here)
}

// checkMounted accepts our own guard and nothing else.
func (g *guards) checkMounted(t *target, dir int, here mountStat) error {
	ours, err := g.isOurs(t, dir, here)
	if err != nil {
		return t.guardError("looked at", err)
	}
	if !ours {
		return Errorf(Conflict, "volume %s: something else is mounted on the target already: "+
			"the filesystem of a deferred volume must not be mounted on the host; unmount it first", t.given)
	}
	return nil
}

// remove takes the guard away, and whatever kubelet made inside with it; and the
// directory too where that is ours. What else is mounted there is left alone. A
// target without guard is a success.
func (g *guards) remove(t *target, directory bool) error {
	parent, err := t.openParent()
	if err != nil {
		if kind := KindOf(err); kind == NotFound || kind == Invalid {
			return nil // no directory: no guard can stand there
		}
		return err
	}
	defer closeFD(parent)
	// A second guard can lie under the first where two processes raced.
	for range 8 {
		none, err := g.removeTop(t, parent)
		if err != nil {
			return err
		}
		if directory {
			gone, err := t.removeDir(parent)
			if err != nil || gone {
				g.forget(t.key())
				return err
			}
		}
		if none {
			return nil
		}
	}
	return Errorf(Internal, "volume %s: guard mounts keep coming back on the target", t.given)
}

// removeDir removes the empty target directory, and tells whether it is gone.
// Anything in it, or mounted on it, is not ours.
func (t *target) removeDir(parent int) (gone bool, err error) {
	err = unix.Unlinkat(parent, t.base(), unix.AT_REMOVEDIR)
	switch {
	case err == nil, errors.Is(err, unix.ENOENT):
		return true, nil
	case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EBUSY), errors.Is(err, unix.ENOTDIR):
		return false, nil
	default:
		return false, Errorf(Internal, "volume %s: the target directory cannot be removed: %w", t.given, err)
	}
}

func (g *guards) removeTop(t *target, parent int) (gone bool, err error) {
	dir, err := t.openIn(parent)
	if err != nil {
		kind := KindOf(err)
		if kind == NotFound || kind == Invalid || kind == Denied {
			return true, nil // not a directory: not a guard
		}
		return false, err
	}
	defer closeFD(dir)
	ours, err := g.stands(t, dir)
	if err != nil {
		return false, t.guardError("looked at", err)
	}
	if !ours {
		g.forget(t.key())
		return true, nil
	}
	// Detached, because the descriptor that proved it to be ours, and kubelet's
	// binds of sub-directories, keep it busy.
	const flags = unix.MNT_DETACH | unix.UMOUNT_NOFOLLOW
	if err := unix.Unmount(procFD(parent)+"/"+t.base(), flags); err != nil && !errors.Is(err, unix.EINVAL) {
		return false, t.guardError("unmounted", err)
	}
	return false, nil
}

func (g *guards) forget(key Key) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.mounts, key)
}

func (g *guards) isOurs(t *target, dir int, here mountStat) (bool, error) {
	g.mu.Lock()
	known, ok := g.mounts[t.key()]
	g.mu.Unlock()
	if ok && known != 0 && known == here.id {
		return true, nil
	}
	ours, err := isGuard(dir, t.key())
	if err != nil || !ours {
		return false, err
	}
	return true, g.remember(t, dir)
}

func (t *target) guardError(verb string, err error) error {
	kind, hint := Internal, ""
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.ENOMEM):
		kind, hint = Exhausted, " (is the node out of memory, or at fs.mount-max?)"
	case errors.Is(err, unix.ENOTTY), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EOPNOTSUPP):
		kind, hint = Unsupported, " (a kernel of 6.0 or newer is needed)"
	}
	return Errorf(kind, "volume %s: the guard of the target cannot be %s%s: %w", t.given, verb, hint, err)
}

// refuseFull refuses a target that holds files: the guard would hide them.
func refuseFull(t *target, dir int) error {
	fd, err := openBeneath(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return t.openError(t.resolved, err)
	}
	defer closeFD(fd)
	buf := make([]byte, 1024)
	n, err := unix.ReadDirent(fd, buf)
	if err != nil {
		return t.openError(t.resolved, err)
	}
	if _, entries, _ := unix.ParseDirent(buf[:n], -1, nil); entries > 0 {
		return Errorf(Conflict, "volume %s: the target directory is not empty: "+
			"it may hold data that somebody wrote while nothing was mounted; look at it and move it away", t.given)
	}
	return nil
}

// buildGuard makes the filled tmpfs, mounted nowhere yet.
func buildGuard(key Key) (int, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return noFD, fmt.Errorf("fsopen tmpfs: %w", err)
	}
	defer closeFD(fs)
	page := os.Getpagesize()
	for _, option := range [][2]string{
		{"source", guardPrefix + string(key)},
		{"size", strconv.Itoa(page)},
		{"nr_inodes", strconv.Itoa(guardInodes)},
		{"mode", "0755"},
	} {
		if err := unix.FsconfigSetString(fs, option[0], option[1]); err != nil {
			return noFD, fmt.Errorf("tmpfs option %s: %w", option[0], err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return noFD, fmt.Errorf("create tmpfs: %w", err)
	}
	const attrs = unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC
	mount, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attrs)
	if err != nil {
		return noFD, fmt.Errorf("fsmount: %w", err)
	}
	if err := fillGuard(mount, notice(key, page)); err != nil {
		closeFD(mount)
		return noFD, err
	}
	return mount, nil
}

// fillGuard writes the notice over the only page and makes it immutable: root in
// a container with the default capabilities can neither remove nor truncate it,
// so the page never comes free.
func fillGuard(mount int, text []byte) error {
	fd, err := unix.Openat(mount, guardNotice, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, 0o444)
	if err != nil {
		return fmt.Errorf("make notice: %w", err)
	}
	defer closeFD(fd)
	if err := writeAll(fd, text); err != nil {
		return fmt.Errorf("write notice: %w", err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, fsImmutable); err != nil {
		return fmt.Errorf("make notice immutable: %w", err)
	}
	return nil
}

func notice(key Key, page int) []byte {
	text := "This directory stands in for a volume whose filesystem is mounted inside the\n" +
		"pod's sandbox, by crust-proxy. A program that reads this was started by a runtime\n" +
		"that does not know of the volume: check the pod's runtimeClassName and, for Kata,\n" +
		"that disable_block_device_use is not true. Nothing can be written here.\n" +
		"volume: " + string(key) + "\n"
	return append([]byte(text), bytes.Repeat([]byte("\n"), page-len(text))...)
}

// mountStat is what statx tells of the mount a descriptor is on.
type mountStat struct {
	id     uint64
	isRoot bool // the descriptor is the root of a mount
}

func statMount(fd int) (mountStat, error) {
	var st unix.Statx_t
	// The unique id is never given again; kernels before 6.8 answer with the
	// reusable one, and then the guard itself is looked at.
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID_UNIQUE, &st)
	if err != nil {
		return mountStat{}, err
	}
	out := mountStat{isRoot: st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0}
	if st.Mask&unix.STATX_MNT_ID_UNIQUE != 0 {
		out.id = st.Mnt_id
	}
	return out, nil
}

// isGuard tells a guard by what it is: a tmpfs of one page whose immutable
// notice names the volume. Its mount source says the same to others; to read
// that from mountinfo, which holds every mount of the node, would make the start
// with many volumes take minutes.
func isGuard(dir int, key Key) (bool, error) {
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
	defer closeFD(fd)
	flags, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS)
	if err != nil || flags&fsImmutable == 0 {
		return false, err
	}
	text := make([]byte, os.Getpagesize())
	n, err := unix.Pread(fd, text, 0)
	if err != nil {
		return false, err
	}
	return bytes.Equal(text[:n], notice(key, len(text))), nil
}
