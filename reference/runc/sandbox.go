package runc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/fsmount"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/process"
)

// pause is the process of a sandbox. Its mount namespace has the volumes of the pod.
type pause struct{ process.Process }

// volumesDir is the directory for volumes in the sandbox: its /dev is a tmpfs of its
// own, however read-only the rest of it is.
const volumesDir = "/dev/crust"

// noSymlinks keeps a path from leading out of a sandbox: if the containers of a pod share a
// process namespace, root in one of them can write to the sandbox's /dev.
const noSymlinks = unix.RESOLVE_NO_SYMLINKS

// openVolume opens the root of the sandbox's mount of a volume. The error is ENOENT if the sandbox has no mount of it.
func (p pause) openVolume(volume string, info abi.Info) (int, error) {
	proc, err := p.Open()
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(proc) }()
	fd, err := openIn(proc, volume, info)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) && p.Ended() {
		return -1, process.ErrEnded
	}
	return fd, err
}

// openIn opens a volume in a sandbox, given the /proc directory of its process. A process of
// the pod may have replaced it, so this checks that it is on the volume's device. The
// descriptor is O_PATH, because a filesystem that has shut down allows no other.
func openIn(proc int, volume string, info abi.Info) (int, error) {
	root, err := unix.Openat(proc, "root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	fd, err := sys.OpenBeneath(root, volumesDir[1:]+"/"+volume, unix.O_PATH|unix.O_DIRECTORY, noSymlinks)
	_ = unix.Close(root)
	if err == nil {
		if err = checkHeld(fd, info); err != nil {
			_ = unix.Close(fd)
		}
	}
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, fsops.ErrElsewhere) {
		err = fmt.Errorf("a process of the pod has put something else in the place of the volume (%w): delete the pod", err)
	}
	if err != nil {
		return -1, err
	}
	return fd, nil
}

// checkHeld checks that a descriptor is the root of a mount of the volume's device.
func checkHeld(fd int, info abi.Info) error {
	var is unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &is); err != nil {
		return err
	}
	if is.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return fmt.Errorf("nothing is mounted: %w", unix.ENOENT)
	}
	major, minor, known, err := info.DeviceNumber()
	if err != nil {
		return err
	}
	number := unix.Mkdev(major, minor)
	if !known {
		var st unix.Stat_t
		if err := unix.Stat(info.Device, &st); err != nil {
			return fmt.Errorf("the device %s cannot be looked at: %w", info.Device, err)
		}
		number = uint64(st.Rdev) //nolint:unconvert // narrower on other architectures
	}
	return fsops.LiesOn(fd, number)
}

// holder is a live sandbox that has a volume mounted.
type holder struct {
	sandbox string
	root    int // an open descriptor of the filesystem's root
}

// hint names the capability that is missing if the kernel denies access to a sandbox.
func hint(err error) string {
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
		return ": it takes CAP_SYS_PTRACE, which crust-proxy's service has with the drop-in crust-runc.conf"
	}
	return ""
}

// findHolder finds the newest live sandbox that has the volume. The caller closes its descriptor.
func findHolder(dir *abi.Dir, info abi.Info) (holder, error) {
	ids, err := dir.Sandboxes()
	if err != nil {
		return holder{}, err
	}
	for _, id := range ids {
		raw, err := dir.Read(id, 4096)
		if errno := unix.Errno(0); errors.As(err, &errno) && errno != unix.ENOENT {
			return holder{}, fmt.Errorf("sandbox %s: its file cannot be read: %w", id, err)
		}
		var p pause
		if err != nil || json.Unmarshal(raw, &p) != nil {
			continue // of another program, or being removed
		}
		fd, err := p.openVolume(dir.Name(), info)
		if errors.Is(err, process.ErrEnded) || errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return holder{}, fmt.Errorf("sandbox %s: its mount of the volume cannot be opened: %w%s", id, err, hint(err))
		}
		return holder{sandbox: id, root: fd}, nil
	}
	return holder{}, handler.ErrNoSandbox
}

// lockTime bounds the wait for the lock of a sandbox's volumes. Another container of the pod may hold it while it grows
// a filesystem or changes its group; a malicious process of the pod may hold it for ever.
const lockTime = 90 * time.Second

// lockVolumesDir makes the directory for volumes in the sandbox and locks it, so that one
// container at a time mounts what is missing. Closing the descriptor unlocks it.
func (p pause) lockVolumesDir() (lock int, err error) {
	err = p.Inside(func() (err error) {
		lock, err = makeVolumesDir()
		return err
	})
	if err != nil {
		return -1, err
	}
	if err = lockWithin(lock, lockTime); err == nil && p.Ended() {
		err = process.ErrEnded
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(lock))
	}
	return lock, nil
}

func lockWithin(fd int, most time.Duration) error {
	err := sys.Lock(context.Background(), fd, most)
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return fmt.Errorf("the sandbox's volumes have been locked for %v, by another container of the pod that is being "+
			"created, while many files are given to the fsGroup, or by a process in the pod: it is tried again; delete the pod if that goes on: %w", most, err)
	case err != nil:
		return fmt.Errorf("the sandbox's volumes cannot be locked: %w", err)
	}
	return nil
}

// makeVolumesDir must run in the sandbox's mount namespace.
func makeVolumesDir() (int, error) {
	root, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(root) }()
	dev, err := sys.OpenBeneath(root, "dev", unix.O_PATH|unix.O_DIRECTORY, noSymlinks)
	if err != nil {
		return -1, fmt.Errorf("the sandbox's /dev cannot be opened: %w", err)
	}
	defer func() { _ = unix.Close(dev) }()
	var st unix.Statfs_t
	if err := unix.Fstatfs(dev, &st); err != nil {
		return -1, fmt.Errorf("the sandbox's /dev cannot be looked at: %w", err)
	}
	if st.Type != unix.TMPFS_MAGIC {
		return -1, errors.New("the sandbox's /dev is not a tmpfs of its own, so that there is no place for volumes in it")
	}
	// Mounts below it must not propagate anywhere else.
	if err := unix.MountSetattr(dev, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Propagation: unix.MS_PRIVATE}); err != nil {
		return -1, fmt.Errorf("the sandbox's /dev cannot be made private: %w", err)
	}
	return makeDir(dev, path.Base(volumesDir), unix.O_RDONLY)
}

// makeDir makes a directory in a sandbox and opens it. It fails if something is mounted there.
func makeDir(in int, name string, flags uint64) (int, error) {
	if err := mkdirAsOwner(in, name); err != nil && !errors.Is(err, unix.EEXIST) {
		return -1, fmt.Errorf("no place for volumes can be made in the sandbox: %w", err)
	}
	fd, err := sys.OpenBeneath(in, name, flags|unix.O_DIRECTORY, noSymlinks|unix.RESOLVE_NO_XDEV)
	if err != nil {
		return -1, fmt.Errorf("the place for volumes in the sandbox cannot be opened: a process of the pod may have changed it: %w", err)
	}
	return fd, nil
}

// mkdirAsOwner makes a directory as the owner of its parent: in the /dev of a sandbox with a user namespace, the node's
// root has no rights. It changes credentials of the thread, and so must run in a thread of Inside.
func mkdirAsOwner(in int, name string) error {
	var st unix.Stat_t
	if err := unix.Fstat(in, &st); err != nil {
		return err
	}
	if err := setFSOwner(int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	return errors.Join(unix.Mkdirat(in, name, 0o700), setFSOwner(0, 0))
}

func setFSOwner(uid, gid int) error {
	return errors.Join(unix.Setfsgid(gid), unix.Setfsuid(uid))
}

// attach moves a detached mount into the directory for volumes in the sandbox.
func (p pause) attach(dir, mount int, volume string) error {
	return p.Inside(func() error {
		point, err := makeDir(dir, volume, unix.O_PATH)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(point) }()
		if err := fsmount.Move(mount, point); err != nil {
			return fmt.Errorf("the volume cannot be mounted in the sandbox: %w", err)
		}
		return nil
	})
}

// show mounts a copy of the sandbox's mount of a volume, or of a sub-directory, which is made if it is missing, over the
// source of a mount. It has the mount attributes of the volume's options.
func (p pause) show(m *oci.Mount) error {
	root, err := p.openVolume(m.Volume, m.Info)
	if err != nil {
		return fmt.Errorf("the volume is not mounted in the sandbox: %w", err)
	}
	defer func() { _ = unix.Close(root) }()
	mount := -1
	if err := p.Inside(func() error {
		dir, err := fsmount.Descend(root, m.Sub)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(dir) }()
		mount, err = fsmount.Clone(dir, m.Info)
		return err
	}); err != nil {
		return err
	}
	defer func() { _ = unix.Close(mount) }()
	if err := fsmount.Move(mount, m.Source); err != nil {
		return fmt.Errorf("the volume cannot be put in its place: %w", err)
	}
	return nil
}
