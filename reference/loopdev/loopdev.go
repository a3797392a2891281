// Package loopdev attaches files and block devices to loop devices. It needs neither losetup nor udev.
package loopdev

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Options says how a loop device is made.
type Options struct {
	ReadOnly bool
	// DirectIO asks for direct I/O to the backing file; where that cannot do it the device works without.
	DirectIO bool
	// SectorSize is that of the device, in bytes; 0 leaves it to the kernel. One that
	// the backing cannot do direct I/O with makes the device work without.
	SectorSize uint32
}

// attachTries bounds the race for a free device: between the asking and the taking of one, another program may take it.
const attachTries = 64

// Attach makes a loop device over a file or block device, which is opened as a VMM opens a disk, and gives its path.
func Attach(backing string, opts Options) (string, error) {
	loop, err := attach(backing, opts, 0)
	if err != nil {
		return "", err
	}
	return loop.Name(), loop.Close()
}

// AttachHeld makes a loop device that goes away when its last user closes it. The caller is its first user.
func AttachHeld(backing string, opts Options) (*os.File, error) {
	return attach(backing, opts, unix.LO_FLAGS_AUTOCLEAR)
}

func attach(backing string, opts Options, asked uint32) (*os.File, error) {
	flags := unix.O_RDWR
	if opts.ReadOnly {
		flags = unix.O_RDONLY
	}
	fd, err := open(backing, flags)
	if err != nil {
		return nil, fmt.Errorf("attach %s: %w", backing, err)
	}
	defer func() { _ = unix.Close(fd) }()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("attach %s: %w", backing, err)
	}
	defer func() { _ = control.Close() }()
	for range attachTries {
		loop, err := attachFree(int(control.Fd()), fd, opts, asked)
		if errors.Is(err, unix.EBUSY) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("attach %s: %w", backing, err)
		}
		return loop, nil
	}
	return nil, fmt.Errorf("attach %s: no loop device stayed free in %d tries", backing, attachTries)
}

// open is os.OpenFile without epoll, which asks the file's filesystem: if that hangs, Go can run no other goroutine.
func open(path string, flags int) (fd int, err error) {
	for {
		fd, err = unix.Open(path, flags|unix.O_CLOEXEC, 0)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

func attachFree(control, backing int, opts Options, asked uint32) (*os.File, error) {
	n, err := unix.IoctlRetInt(control, unix.LOOP_CTL_GET_FREE)
	if err != nil {
		return nil, fmt.Errorf("find a free loop device: %w", err)
	}
	path := fmt.Sprintf("/dev/loop%d", n)
	loop, err := os.OpenFile(path, os.O_RDWR, 0) //nolint:gosec // a number from the kernel
	if err != nil {
		return nil, err
	}
	config := unix.LoopConfig{Fd: uint32(backing)} //nolint:gosec // descriptors are small
	config.Size, config.Info.Flags = opts.SectorSize, asked
	if opts.ReadOnly {
		config.Info.Flags |= unix.LO_FLAGS_READ_ONLY
	}
	if opts.DirectIO {
		config.Info.Flags |= unix.LO_FLAGS_DIRECT_IO
	}
	if err := unix.IoctlLoopConfigure(int(loop.Fd()), &config); err != nil {
		return nil, errors.Join(err, loop.Close())
	}
	if opts.ReadOnly {
		return loop, nil
	}
	// Who made the device read-only under an earlier backing may have been killed.
	if err := unix.IoctlSetPointerInt(int(loop.Fd()), unix.BLKROSET, 0); err != nil {
		return nil, errors.Join(err, unix.IoctlSetInt(int(loop.Fd()), unix.LOOP_CLR_FD, 0), loop.Close())
	}
	return loop, nil
}

// Detach frees a loop device that is the caller's. One that is free already is a success.
func Detach(path string) error {
	if err := set(path, unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", path, err)
	}
	return nil
}

// DetachFrom frees a loop device if it is still over this file: since the caller found it there, it may have become
// another program's. While it is open here it stays whose it is.
func DetachFrom(backing, path string) error {
	var want unix.Stat_t
	if err := unix.Stat(backing, &want); err != nil {
		return &os.PathError{Op: "stat", Path: backing, Err: err}
	}
	loop, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) //nolint:gosec // the caller names the device
	if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENOENT) {
		return nil // the device itself is gone
	}
	if err != nil {
		return err
	}
	defer func() { _ = loop.Close() }()
	info, err := look(path)
	if errors.Is(err, unix.ENXIO) || err == nil && (info.Device != want.Dev || info.Inode != want.Ino) {
		return nil
	}
	if err == nil {
		err = unix.IoctlSetInt(int(loop.Fd()), unix.LOOP_CLR_FD, 0)
	}
	if err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", path, err)
	}
	return nil
}

// SetDirectIO turns direct I/O on or off. It is unix.EINVAL where the backing cannot do it with the device's sectors.
func SetDirectIO(path string, on bool) error {
	value := 0
	if on {
		value = 1
	}
	if err := set(path, unix.LOOP_SET_DIRECT_IO, value); err != nil {
		return fmt.Errorf("set direct I/O of %s to %v: %w", path, on, err)
	}
	return nil
}

// Grow makes a loop device take up the present size of its backing.
func Grow(path string) error {
	if err := set(path, unix.LOOP_SET_CAPACITY, 0); err != nil {
		return fmt.Errorf("grow %s: %w", path, err)
	}
	return nil
}

func set(path string, request uint, value int) error {
	loop, err := os.OpenFile(path, os.O_RDONLY, 0) //nolint:gosec // the caller names the device
	if err != nil {
		return err
	}
	defer func() { _ = loop.Close() }()
	return unix.IoctlSetInt(int(loop.Fd()), request, value)
}
