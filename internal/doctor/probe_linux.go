package doctor

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// fsImmutable is FS_IMMUTABLE_FL of linux/fs.h, which x/sys does not name.
const fsImmutable = 0x10

// KernelProbe tries the running kernel.
func KernelProbe() Probe {
	return Probe{Openat2: probeOpenat2, Guard: probeGuard}
}

func probeOpenat2() error {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS}
	fd, err := unix.Openat2(unix.AT_FDCWD, ".", &how)
	if err != nil {
		return fmt.Errorf("openat2: %w", err)
	}
	return unix.Close(fd)
}

// probeGuard makes a tmpfs that is attached nowhere; it vanishes with its fd.
func probeGuard() (err error) {
	mount, err := detachedTmpfs()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Close(mount)) }()
	file, err := unix.Openat(mount, "probe", unix.O_CREAT|unix.O_RDONLY|unix.O_CLOEXEC, 0o400)
	if err != nil {
		return fmt.Errorf("create a file on tmpfs: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(file)) }()
	if err := setFlags(file, fsImmutable); err != nil {
		return fmt.Errorf("make a file on tmpfs immutable: %w", err)
	}
	return setFlags(file, 0)
}

func detachedTmpfs() (fd int, err error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsopen: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(fs)) }()
	if err := unix.FsconfigSetString(fs, "size", "4096"); err != nil {
		return -1, fmt.Errorf("fsconfig: %w", err)
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("fsconfig: %w", err)
	}
	mount, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOEXEC|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return -1, fmt.Errorf("fsmount: %w", err)
	}
	return mount, nil
}

func setFlags(fd int, flags int32) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.FS_IOC_SETFLAGS, uintptr(unsafe.Pointer(&flags))) // #nosec G103 -- the ioctl takes a pointer
	if errno != 0 {
		return errno
	}
	return nil
}
