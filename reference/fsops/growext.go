package fsops

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// extIocResizeFS is of the kernel's linux/ext4.h; older headers lack it.
const extIocResizeFS = 0x40086610

// fdReader reads from a descriptor that it does not own.
type fdReader int

func (fd fdReader) ReadAt(p []byte, at int64) (int, error) {
	n, err := unix.Pread(int(fd), p, at)
	if err == nil && n < len(p) {
		err = errors.New("the device is too small")
	}
	return max(n, 0), err
}

// planExt uses the superblock: statfs does not count the blocks that ext4 needs itself.
func planExt(dir *os.File, device int, bytes int64) (*plan, error) {
	if err := sameDevice(fdOf(dir), device); err != nil {
		return nil, err
	}
	super, err := readExt(fdReader(device))
	if err != nil {
		return nil, fmt.Errorf("read the superblock: %w", err)
	}
	if super == nil {
		return nil, errors.New("the device has no superblock of ext4")
	}
	blocks := uint64(super.fill(bytes)) //nolint:gosec // no size is negative
	return &plan{has: super.blocks * super.block, most: super.fill(bytes) * super.block, grow: func() error {
		_, err := ioctl(fdOf(dir), extIocResizeFS, &blocks)
		if errors.Is(err, unix.EPERM) && !hasResource() {
			return fmt.Errorf("the kernel lets a mounted ext4 grow only with CAP_SYS_RESOURCE, which this process lacks: give it to containerd, or have the volume mounted anew, so that it grows before (%w): %w", err, ErrDenied)
		}
		if errors.Is(err, unix.EPERM) {
			return fmt.Errorf("the kernel lets no ext4 grow that has errors on record: it needs e2fsck while it is not mounted: %w", err)
		}
		if errors.Is(err, unix.EOPNOTSUPP) {
			return fmt.Errorf("this ext4 was made without what growing takes (%w): %w", err, ErrUnsupported)
		}
		return err
	}}, nil
}

// hasResource reports whether this process has CAP_SYS_RESOURCE.
func hasResource() bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	err := unix.Capget(&header, &data[0])
	return err == nil && data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}
