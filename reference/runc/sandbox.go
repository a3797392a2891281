package runc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"runtime"
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

// pause is the process of a sandbox, whose mount namespace holds the volumes of
// the pod.
type pause process.Process

// proc opens the kernel's directory of the process, if it is still the one that it was.
func (p pause) proc() (int, error) {
	dir, err := process.Process(p).Open()
	if errors.Is(err, process.ErrEnded) {
		err = handler.ErrGone
	}
	return dir, err
}

// ended tells whether the process is certainly not the one any more that it was.
func (p pause) ended() bool { return process.Process(p).Ended() }

// places is the directory for volumes in the sandbox: its /dev is a tmpfs of its
// own, however read-only the rest of it is.
const places = "/dev/crust"

// inSandbox keeps a path in a sandbox from leading out of it: where the containers of
// a pod share a process namespace, root in one of them reaches the sandbox's /dev.
const inSandbox = unix.RESOLVE_NO_SYMLINKS

// open opens the root of the sandbox's mount of a volume. It is an ENOENT where the
// sandbox has no mount of it.
func (p pause) open(volume string, info abi.Info) (int, error) {
	proc, err := p.proc()
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(proc) }()
	fd, err := openIn(proc, volume, info)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) && p.ended() {
		return -1, handler.ErrGone
	}
	return fd, err
}

// openIn opens a volume in the sandbox whose process has this directory. Whoever is
// in the pod may have put something else in its place, so the kernel is asked whether
// what was opened lies on the volume's device. The descriptor can only be looked at
// (O_PATH): a filesystem that has shut down gives no other any more.
func openIn(proc int, volume string, info abi.Info) (int, error) {
	root, err := unix.Openat(proc, "root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	fd, err := sys.OpenBeneath(root, places[1:]+"/"+volume, unix.O_PATH|unix.O_DIRECTORY, inSandbox)
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

// checkHeld makes sure that a descriptor is the root of a mount, and that the volume's
// device is mounted there.
func checkHeld(fd int, info abi.Info) error {
	mounted, err := isMounted(fd)
	if err != nil {
		return err
	}
	if !mounted {
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

// isMounted tells whether a descriptor is the root of a mount.
func isMounted(fd int) (bool, error) {
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, err
}

// holder is a live sandbox that has a volume mounted.
type holder struct {
	sandbox string
	root    int // an open descriptor of the filesystem's root
}

// hint says what is missing to whom the kernel denies a look into a sandbox.
func hint(err error) string {
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
		return ": it takes CAP_SYS_PTRACE, which crust-proxy's service has with the drop-in crust-runc.conf"
	}
	return ""
}

// findHolder finds the newest live sandbox that has the volume. The caller closes
// its descriptor.
func findHolder(dir *abi.Dir, info abi.Info) (holder, error) {
	ids, err := dir.Sandboxes()
	if err != nil {
		return holder{}, err
	}
	for _, id := range ids {
		raw, err := dir.Read(id, 4096)
		var p pause
		if err != nil || json.Unmarshal(raw, &p) != nil {
			continue // of another program, or on its way out
		}
		fd, err := p.open(dir.Name(), info)
		if errors.Is(err, handler.ErrGone) || errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return holder{}, fmt.Errorf("sandbox %s: its mount of the volume cannot be opened: %w%s", id, err, hint(err))
		}
		return holder{sandbox: id, root: fd}, nil
	}
	return holder{}, handler.ErrNoSandbox
}

// inside runs f in the sandbox's mount namespace. It takes a thread of its own,
// which ends with it: a thread that has left the others' namespace must not run
// anything else.
func (p pause) inside(f func() error) error {
	ns, err := p.namespace()
	if err != nil {
		return fmt.Errorf("the sandbox's mount namespace cannot be opened: %w", err)
	}
	defer func() { _ = unix.Close(ns) }()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		done <- enter(ns, f)
	}()
	return <-done
}

func enter(ns int, f func() error) error {
	if err := setApart(); err != nil {
		return fmt.Errorf("a thread cannot be set apart: %w", err)
	}
	if err := unix.Setns(ns, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("the sandbox's mount namespace cannot be entered: %w", err)
	}
	return f()
}

// setApart gives this thread a root and an umask of its own. A directory then has its mode
// at once: whoever finds it after a kill takes it as it is.
func setApart() error {
	err := unix.Unshare(unix.CLONE_FS)
	if err == nil {
		unix.Umask(0)
	}
	return err
}

// namespace opens the mount namespace of the sandbox.
func (p pause) namespace() (int, error) {
	proc, err := p.proc()
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(proc) }()
	ns, err := unix.Openat(proc, "ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) {
		return -1, handler.ErrGone
	}
	return ns, err
}

// lockTime is how long the lock of a sandbox's volumes is waited for. Another
// container of the pod may have it while it grows a filesystem or gives it to a group;
// a process of the pod may have it for ever.
const lockTime = 90 * time.Second

// preparePlaces makes the directory for volumes in the sandbox and locks it: one
// container at a time mounts what is missing. The lock goes with the descriptor.
func (p pause) preparePlaces() (lock int, err error) {
	err = p.inside(func() (err error) {
		lock, err = makePlaces()
		return err
	})
	if err != nil {
		return -1, err
	}
	if err = lockWithin(lock, lockTime); err == nil && p.ended() {
		err = handler.ErrGone
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

// makePlaces runs in the sandbox's namespace.
func makePlaces() (int, error) {
	root, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(root) }()
	dev, err := sys.OpenBeneath(root, "dev", unix.O_PATH|unix.O_DIRECTORY, inSandbox)
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
	// Nothing that is mounted below may be seen anywhere else.
	if err := unix.MountSetattr(dev, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Propagation: unix.MS_PRIVATE}); err != nil {
		return -1, fmt.Errorf("the sandbox's /dev cannot be made private: %w", err)
	}
	return place(dev, path.Base(places), unix.O_RDONLY)
}

// place makes a directory in a sandbox and opens it. Nothing may be mounted there.
func place(in int, name string, flags uint64) (int, error) {
	if err := mkdirAsOwner(in, name); err != nil && !errors.Is(err, unix.EEXIST) {
		return -1, fmt.Errorf("no place for volumes can be made in the sandbox: %w", err)
	}
	fd, err := sys.OpenBeneath(in, name, flags|unix.O_DIRECTORY, inSandbox|unix.RESOLVE_NO_XDEV)
	if err != nil {
		return -1, fmt.Errorf("the place for volumes in the sandbox cannot be opened: a process of the pod may have changed it: %w", err)
	}
	return fd, nil
}

// mkdirAsOwner makes a directory as the owner of the one that it is in: in the /dev of a
// sandbox with a user namespace, the root of the node is nobody, and can make nothing. It
// changes the thread, and runs in one of inside's.
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

// attach puts a detached mount in its place in the sandbox, below the directory for
// volumes.
func (p pause) attach(dir, mount int, volume string) error {
	return p.inside(func() error {
		point, err := place(dir, volume, unix.O_PATH)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(point) }()
		if err := moveMount(mount, point); err != nil {
			return fmt.Errorf("the volume cannot be mounted in the sandbox: %w", err)
		}
		return nil
	})
}

// clone gives a detached copy of the sandbox's mount of a volume, or of a
// sub-directory of it, which is made where it is missing. Its attributes are those
// that the volume's options ask for.
func (p pause) clone(m *oci.Mount) (mount int, err error) {
	root, err := p.open(m.Volume, m.Info)
	if err != nil {
		return -1, fmt.Errorf("the volume is not mounted in the sandbox: %w", err)
	}
	defer func() { _ = unix.Close(root) }()
	mount = -1
	err = p.inside(func() error {
		dir, err := fsmount.Descend(root, m.Sub)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(dir) }()
		mount, err = fsmount.Clone(dir, m.Info)
		return err
	})
	return mount, err
}

func (p pause) show(m *oci.Mount) error {
	mount, err := p.clone(m)
	if err != nil {
		return err
	}
	return errors.Join(overmount(mount, m.Source), unix.Close(mount))
}
