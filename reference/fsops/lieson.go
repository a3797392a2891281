package fsops

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// ErrElsewhere means that the filesystem is not on the device that it should be on.
var ErrElsewhere = errors.New("it is another filesystem")

// LiesOn checks that the filesystem of a root directory is on the block device with this
// number. The descriptor may be an O_PATH one.
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

// btrfsDevice returns the device number of a btrfs that has one device, found by the path
// under which btrfs knows it.
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
