package fsops

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// plan says how far a filesystem can grow, and how.
type plan struct {
	has, most int64 // bytes: now, and on this device
	grow      func() error
}

// full reports whether the filesystem fills its device.
func (p *plan) full() bool { return p.has >= p.most }

// Grow makes a mounted filesystem fill its device, and returns the size of the device; a
// filesystem may leave a small rest of it unused. The device must have at least minimum
// bytes and, unless maximum is 0, at most maximum bytes; otherwise nothing is changed. It
// is a success if the filesystem fills the device already.
func Grow(root, device int, minimum, maximum int64) (int64, error) {
	bytes, err := deviceSize(device)
	if err != nil {
		return 0, err
	}
	if bytes < minimum {
		return 0, fmt.Errorf("grow the filesystem: its device has %d bytes, and at least %d are asked for: the device has to grow first: %w", bytes, minimum, ErrOutOfRange)
	}
	if maximum > 0 && bytes > maximum {
		return 0, fmt.Errorf("grow the filesystem: it would have the %d bytes of its device, and at most %d are asked for: %w", bytes, maximum, ErrOutOfRange)
	}
	dir, err := openDir(root, ".")
	if err != nil {
		return 0, fmt.Errorf("grow the filesystem: open its root directory: %w", err)
	}
	defer func() { _ = dir.Close() }()
	p, err := planFor(dir, device, bytes)
	if err != nil {
		return 0, err
	}
	if p.full() {
		return bytes, nil
	}
	if err := p.grow(); err != nil {
		return 0, fmt.Errorf("grow the filesystem from %d to %d bytes: %w", p.has, p.most, err)
	}
	return bytes, nil
}

// planFor compares a filesystem with its device, which has this many bytes.
func planFor(dir *os.File, device int, bytes int64) (*plan, error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fdOf(dir), &fs); err != nil {
		return nil, fmt.Errorf("compare the filesystem with its device: statfs: %w", err)
	}
	var p *plan
	var err error
	switch fs.Type {
	case unix.EXT4_SUPER_MAGIC:
		p, err = planExt(dir, device, bytes)
	case unix.XFS_SUPER_MAGIC:
		p, err = planXFS(dir, device, bytes)
	case unix.BTRFS_SUPER_MAGIC:
		p, err = planBtrfs(dir, device, bytes)
	default:
		err = fmt.Errorf("a filesystem of type %#x cannot grow while it is mounted: ext4, xfs and btrfs can: %w", fs.Type, ErrUnsupported)
	}
	if err != nil {
		return nil, fmt.Errorf("compare the filesystem with its device: %w", err)
	}
	return p, nil
}

// deviceSize returns the size of a block device.
func deviceSize(device int) (int64, error) {
	var bytes uint64
	if _, err := ioctl(device, unix.BLKGETSIZE64, &bytes); err != nil {
		return 0, fmt.Errorf("ask for the size of the device: %w", err)
	}
	return times(bytes, 1), nil
}

// sameDevice checks that a filesystem is on a device.
func sameDevice(root, device int) error {
	var dev unix.Stat_t
	if err := unix.Fstat(device, &dev); err != nil {
		return err
	}
	return LiesOn(root, uint64(dev.Rdev)) //nolint:unconvert // narrower on other architectures
}
