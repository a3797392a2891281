package guest

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/reference/fsmount"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

// mount mounts the container's root directory and changes to it. It runs in the container's own
// process, in a new mount namespace.
func (s *setup) mount() error {
	unix.Umask(0)
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	dir := s.Spec.Root.Path
	if err := unix.Mount(dir, dir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount the root filesystem: %w", err)
	}
	root, err := sys.OpenDir(dir)
	if err != nil {
		return err
	}
	defer sys.CloseFD(root)
	// Only now: a cgroup namespace has its root at the group of the process that creates it.
	if err := unix.Unshare(int(s.Namespaces & unix.CLONE_NEWCGROUP)); err != nil {
		return err
	}
	for i, m := range s.Spec.Mounts {
		if err := mountInto(root, m, s.Volumes[i]); err != nil {
			return fmt.Errorf("mount %s: %w", m.Destination, err)
		}
	}
	if err := makeDevices(root); err != nil {
		return fmt.Errorf("make the devices: %w", err)
	}
	if err := enterRoot(root); err != nil {
		return fmt.Errorf("change to the root filesystem: %w", err)
	}
	return finishRoot(s.Spec, s.Namespaces)
}

// finishRoot completes the setup inside the container's root directory.
func finishRoot(spec *specs.Spec, namespaces uintptr) error {
	if spec.Hostname != "" && namespaces&unix.CLONE_NEWUTS != 0 {
		if err := unix.Sethostname([]byte(spec.Hostname)); err != nil {
			return fmt.Errorf("set the host name: %w", err)
		}
	}
	if linux := spec.Linux; linux != nil {
		if err := setSysctls(linux.Sysctl); err != nil {
			return err
		}
		for _, path := range linux.ReadonlyPaths {
			if err := overmount(path, readOnlyCopy); err != nil {
				return fmt.Errorf("make %s read-only: %w", path, err)
			}
		}
		for _, path := range linux.MaskedPaths {
			if err := overmount(path, emptyMount); err != nil {
				return fmt.Errorf("mask %s: %w", path, err)
			}
		}
	}
	if spec.Root.Readonly {
		return unix.MountSetattr(unix.AT_FDCWD, "/", 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	}
	return nil
}

type mountOptions struct {
	set, clear    uint64 // attributes
	recursiveAttr bool   // set and clear apply to the mounts below, too
	bind          bool
	recursiveBind bool
	rest          []string // the options of the filesystem
}

func parseMount(m specs.Mount) mountOptions {
	o := mountOptions{bind: m.Type == "bind"}
	for _, option := range m.Options {
		switch {
		case o.attribute(option):
		case strings.HasPrefix(option, "r") && o.attribute(option[1:]):
			o.recursiveAttr = true // such as rro
		case option == "bind":
			o.bind = true
		case option == "rbind":
			o.bind, o.recursiveBind = true, true
		case strings.HasSuffix(option, "private"), strings.HasSuffix(option, "slave"), strings.HasSuffix(option, "shared"):
			// There are no later mounts that could propagate.
		default:
			o.rest = append(o.rest, option)
		}
	}
	return o
}

func (o *mountOptions) attribute(option string) bool {
	sets, clears, ofMount := fsmount.Attr(option)
	switch option {
	case "ro":
		sets, ofMount = unix.MOUNT_ATTR_RDONLY, true
	case "rw":
		clears, ofMount = unix.MOUNT_ATTR_RDONLY, true
	}
	o.set, o.clear = o.set&^uint64(clears)|uint64(sets), o.clear|uint64(clears)
	return ofMount
}

// mountInto creates a mount of the spec below the root directory.
func mountInto(root int, m specs.Mount, volume *volumeMount) error {
	o := parseMount(m)
	if len(o.rest) > 0 && (o.bind || volume != nil) {
		return unsupported("the mount option " + o.rest[0])
	}
	mount, err := o.open(m, volume)
	if err != nil {
		return err
	}
	defer sys.CloseFD(mount)
	attr := unix.MountAttr{Attr_set: o.set, Attr_clr: o.clear, Propagation: unix.MS_PRIVATE}
	flags := uint(unix.AT_EMPTY_PATH)
	if o.recursiveAttr {
		flags |= unix.AT_RECURSIVE
	}
	if err := unix.MountSetattr(mount, "", flags, &attr); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(mount, &st); err != nil {
		return err
	}
	at, err := openMountPoint(root, m.Destination, st.Mode&unix.S_IFMT == unix.S_IFDIR)
	if err != nil {
		return err
	}
	defer sys.CloseFD(at)
	return fsmount.Move(mount, at)
}

// open creates a detached mount.
func (o mountOptions) open(m specs.Mount, volume *volumeMount) (int, error) {
	switch {
	case volume != nil:
		return volume.open()
	case o.bind:
		flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC)
		if o.recursiveBind {
			flags |= unix.AT_RECURSIVE
		}
		return unix.OpenTree(unix.AT_FDCWD, m.Source, flags)
	case m.Type == "cgroup" || m.Type == "cgroup2":
		return fsops.NewMount("cgroup2", "cgroup", nil, 0)
	default:
		return fsops.NewMount(m.Type, m.Source, o.rest, 0)
	}
}

// open creates a detached mount of the directory.
func (v *volumeMount) open() (int, error) {
	root, err := openMounted(v.Path)
	if err != nil {
		return -1, err
	}
	defer sys.CloseFD(root)
	dir, err := fsmount.Descend(root, v.Sub)
	if err != nil {
		return -1, err
	}
	defer sys.CloseFD(dir)
	return fsmount.Clone(dir, v.Info)
}

// inRoot keeps symbolic links from leading out of the root filesystem.
const inRoot = unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS

func openIn(root int, name string, flags uint64) (int, error) {
	return unix.Openat2(root, name, &unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: inRoot})
}

// openMountPoint opens the mount point of a mount. It creates missing directories, and what a symbolic link leads to.
func openMountPoint(root int, name string, dir bool) (int, error) {
	name = "/" + strings.Trim(name, "/")
	fd, err := openIn(root, name, unix.O_PATH)
	if !errors.Is(err, unix.ENOENT) {
		return fd, err // a loop of links is ELOOP
	}
	above, base := path.Split(name)
	parent, err := openMountPoint(root, above, true)
	if err != nil {
		return -1, err
	}
	defer sys.CloseFD(parent)
	link := make([]byte, unix.PathMax)
	if n, err := unix.Readlinkat(parent, base, link); err == nil {
		to := string(link[:n])
		if !path.IsAbs(to) {
			to = above + to
		}
		return openMountPoint(root, to, dir)
	}
	if dir {
		err = unix.Mkdirat(parent, base, 0o755) // of "." or "..", it is there now
	} else {
		fd, err = unix.Openat(parent, base, unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
		sys.CloseFD(fd)
	}
	if err != nil && (!dir || !errors.Is(err, unix.EEXIST)) {
		return -1, err
	}
	return openIn(root, name, unix.O_PATH)
}

// makeDevices creates the usual devices and links in /dev, if that is a tmpfs of the container.
func makeDevices(root int) error {
	dev, err := openIn(root, "dev", unix.O_PATH|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer sys.CloseFD(dev)
	var fs unix.Statfs_t
	if err := unix.Fstatfs(dev, &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		return err
	}
	for name, number := range map[string]uint64{
		"null": unix.Mkdev(1, 3), "zero": unix.Mkdev(1, 5), "full": unix.Mkdev(1, 7), "random": unix.Mkdev(1, 8), "urandom": unix.Mkdev(1, 9),
		"tty": unix.Mkdev(5, 0),
	} {
		if err := unix.Mknodat(dev, name, unix.S_IFCHR|0o666, int(number)); err != nil { //nolint:gosec // small
			return err
		}
	}
	for name, to := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx",
	} {
		if err := unix.Symlinkat(to, dev, name); err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
	}
	return nil
}

// enterRoot changes the root directory, and unmounts everything outside.
func enterRoot(root int) error {
	if err := unix.Fchdir(root); err != nil {
		return err
	}
	// This stacks the old root under the new one.
	if err := unix.PivotRoot(".", "."); err != nil {
		return err
	}
	return errors.Join(unix.Unmount(".", unix.MNT_DETACH), unix.Chdir("/"))
}

// overmount mounts over a path, if it exists.
func overmount(name string, with func(at int) (int, error)) error {
	at, err := unix.Open(name, unix.O_PATH|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EACCES) {
		return nil
	}
	if err != nil {
		return err
	}
	defer sys.CloseFD(at)
	mount, err := with(at)
	if err != nil {
		return err
	}
	defer sys.CloseFD(mount)
	return fsmount.Move(mount, at)
}

func readOnlyCopy(at int) (int, error) {
	mount, err := unix.OpenTree(at, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1, err
	}
	err = unix.MountSetattr(mount, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	if err != nil {
		return -1, errors.Join(err, unix.Close(mount))
	}
	return mount, nil
}

// emptyMount is an empty directory or file.
func emptyMount(at int) (int, error) {
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil {
		return -1, err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return fsops.NewMount("tmpfs", "tmpfs", nil, unix.MOUNT_ATTR_RDONLY)
	}
	return unix.OpenTree(unix.AT_FDCWD, os.DevNull, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
}
