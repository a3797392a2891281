package runc

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

// pause is the process of a sandbox, whose mount namespace holds the volumes of
// the pod. Its number alone would not do: the kernel gives it again.
type pause struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // in clock ticks since the boot
}

// errGone is a sandbox that has ended.
var errGone = errors.New("the sandbox has ended")

// openProc opens the kernel's directory of a process and tells when that was
// started. The directory is of that process for ever: when its number is given
// again, nothing can be opened in it any more.
func openProc(pid int) (dir int, start uint64, err error) {
	dir, err = unix.Open("/proc/"+strconv.Itoa(pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, 0, err
	}
	if start, err = startOf(dir); err != nil {
		_ = unix.Close(dir)
		return -1, 0, err
	}
	return dir, start, nil
}

// startOf reads when a process was started. Its name can hold anything, so the
// fields are counted from the last parenthesis.
func startOf(dir int) (uint64, error) {
	fd, err := unix.Openat(dir, "stat", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer func() { _ = unix.Close(fd) }()
	var buf [1024]byte // the kernel gives all of it at once
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return 0, err
	}
	text := string(buf[:n])
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	const state, start = 0, 19
	if len(fields) <= start {
		return 0, errors.New("the kernel's word on the process cannot be read")
	}
	if fields[state] == "Z" || fields[state] == "X" {
		return 0, errGone
	}
	return strconv.ParseUint(fields[start], 10, 64)
}

// identify takes a process by its number.
func identify(pid int) (pause, error) {
	dir, start, err := openProc(pid)
	if err == nil {
		err = unix.Close(dir)
	}
	return pause{PID: pid, Start: start}, err
}

// proc opens the directory of the process, if it is still the one that it was.
func (p pause) proc() (int, error) {
	if p.PID <= 0 {
		return -1, errGone
	}
	dir, start, err := openProc(p.PID)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ESRCH):
		return -1, errGone
	case err != nil:
		return -1, err
	case start != p.Start:
		_ = unix.Close(dir)
		return -1, errGone
	}
	return dir, nil
}

// lives tells whether the process is still the one that it was.
func (p pause) lives() bool {
	dir, err := p.proc()
	if err == nil {
		_ = unix.Close(dir)
	}
	return err == nil
}

// places is the directory for volumes in the sandbox: its /dev is a tmpfs of its
// own, however read-only the rest of it is.
const places = "/dev/crust"

// inSandbox keeps a path in a sandbox from leading out of it: where the containers of
// a pod share a process namespace, root in one of them reaches the sandbox's /dev.
const inSandbox = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS

// open opens the root of the sandbox's mount of a volume. It is an ENOENT where the
// sandbox has no mount of it.
func (p pause) open(volume string, info abi.Info) (int, error) {
	proc, err := p.proc()
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(proc) }()
	fd, err := openIn(proc, volume, info)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) && !p.lives() {
		return -1, errGone
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
	fd, err := openBeneath(root, places[1:]+"/"+volume, unix.O_PATH, inSandbox)
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
	pause   pause
	root    int // an open descriptor of the filesystem's root
}

// hint says what is missing to whom the kernel denies a look into a sandbox.
func hint(err error) string {
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
		return ": it takes CAP_SYS_PTRACE, which crust-proxy's service has with the drop-in crust-runc.conf"
	}
	return ""
}

// errNoSandbox says that no live sandbox has the volume.
var errNoSandbox = errors.New("no live sandbox has the volume mounted")

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
		if errors.Is(err, errGone) || errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return holder{}, fmt.Errorf("sandbox %s: its mount of the volume cannot be opened: %w%s", id, err, hint(err))
		}
		return holder{sandbox: id, pause: p, root: fd}, nil
	}
	return holder{}, errNoSandbox
}
