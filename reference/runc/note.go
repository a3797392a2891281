package runc

import (
	"encoding/json"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
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
