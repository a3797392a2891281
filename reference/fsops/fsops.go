// Package fsops works on a mounted filesystem, given a descriptor of its root directory: it changes the group of all
// files, measures usage and health, grows, freezes and thaws. It never resolves a path outside of that directory.
//
// It uses system calls only and has few dependencies: crust-runc, which starts thousands of times a day, imports it.
package fsops

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// The kinds of errors that callers distinguish; every other error is a plain failure. Messages are for people.
var (
	// ErrUnsupported: the filesystem or the kernel cannot do this.
	ErrUnsupported = errors.New("not supported")
	// ErrOutOfRange: the device does not have the requested size.
	ErrOutOfRange = errors.New("out of range")
	// ErrDenied: this process lacks a capability.
	ErrDenied = errors.New("not permitted")
	// ErrChanged: a directory was moved during the walk.
	ErrChanged = errors.New("changed meanwhile")
	// ErrFrozen: the filesystem is frozen already.
	ErrFrozen = errors.New("already frozen")
	// ErrNotFrozen: the filesystem is not frozen, or not any more.
	ErrNotFrozen = errors.New("not frozen")
)

// Ioctl passes a structure to the kernel and returns the result, of which a positive one is an error for some requests.
func Ioctl[T any](fd int, request uint, arg *T) (int, error) {
	for {
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(unsafe.Pointer(arg))) //nolint:gosec // the kernel's interface
		if errno == 0 {
			return int(n), nil
		}
		if !errors.Is(errno, unix.EINTR) {
			return 0, errno
		}
	}
}

// openAt opens a path below a directory. It follows no links, enters no other mount and does not leave the directory.
func openAt(dir int, name string, flags uint64) (int, error) {
	return sys.OpenBeneath(dir, name, flags|unix.O_NOFOLLOW, unix.RESOLVE_NO_XDEV|unix.RESOLVE_NO_SYMLINKS)
}

// openDir opens a directory for reading. With the name ".", it opens an O_PATH descriptor again for reading.
func openDir(dir int, name string) (*os.File, error) {
	fd, err := openAt(dir, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

func fdOf(f *os.File) int { return int(f.Fd()) }

// identity identifies a file while the file exists.
type identity struct{ dev, ino uint64 }

func identify(fd int) (identity, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	return identity{uint64(st.Dev), st.Ino}, err //nolint:unconvert // narrower on other architectures
}

// ErrElsewhere means that the filesystem is not on the device that it should be on.
var ErrElsewhere = errors.New("it is another filesystem")

// LiesOn checks that the filesystem of a root directory, which may be an O_PATH descriptor, is on this block device.
func LiesOn(root int, device uint64) error {
	var st unix.Stat_t
	var fs unix.Statfs_t
	if err := errors.Join(unix.Fstat(root, &st), unix.Fstatfs(root, &fs)); err != nil {
		return err
	}
	is := uint64(st.Dev) //nolint:unconvert // narrower on other architectures
	if fs.Type == unix.BTRFS_SUPER_MAGIC {
		// Each subvolume has a device number of its own, which is that of no device.
		var err error
		if is, err = btrfsDevice(root); err != nil {
			return err
		}
	}
	if is != device {
		return fmt.Errorf("%w: it lies on the device %d:%d and not on %d:%d", ErrElsewhere,
			unix.Major(is), unix.Minor(is), unix.Major(device), unix.Minor(device))
	}
	return nil
}

// OnDevice is LiesOn for an open device.
func OnDevice(root, device int) error {
	var dev unix.Stat_t
	if err := unix.Fstat(device, &dev); err != nil {
		return err
	}
	return LiesOn(root, uint64(dev.Rdev)) //nolint:unconvert // narrower on other architectures
}

// btrfsDevice returns the device number of a btrfs that has one device, found by the path under which btrfs knows it.
func btrfsDevice(root int) (uint64, error) {
	dir, err := openDir(root, ".")
	if err != nil {
		return 0, fmt.Errorf("open its root directory: %w", err)
	}
	defer func() { _ = dir.Close() }()
	fs, devices, err := btrfsDevices(fdOf(dir))
	switch {
	case err != nil:
		return 0, err
	case fs.Devices != 1:
		return 0, fmt.Errorf("%w: it has %d devices", ErrElsewhere, fs.Devices)
	case len(devices) == 0:
		return 0, errors.New("btrfs tells none of its devices")
	}
	number, err := devices[0].number()
	if err != nil {
		return 0, fmt.Errorf("find the device of the btrfs: %w", err)
	}
	return number, nil
}
