package fsops

import (
	"bytes"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

func planBtrfs(dir *os.File, device int, size int64) (*plan, error) {
	var fs btrfsFSInfo
	if _, err := ioctl(fdOf(dir), btrfsIocFSInfo, &fs); err != nil {
		return nil, fmt.Errorf("ask btrfs for its devices: %w", err)
	}
	member, err := btrfsMember(dir, &fs, device)
	if err != nil {
		return nil, err
	}
	sector := int64(max(fs.Sector, 512))
	return &plan{has: times(member.TotalBytes, 1), most: size / sector * sector, grow: func() error {
		args := btrfsVolArgs{}
		copy(args.Name[:], fmt.Sprintf("%d:max", member.DevID))
		// A positive answer is an error too.
		busy, err := ioctl(fdOf(dir), btrfsIocResize, &args)
		if err == nil && busy != 0 {
			return fmt.Errorf("btrfs is at work on its devices (balance, replace or the like); try again when that has ended: %w", unix.EBUSY)
		}
		return err
	}}, nil
}

// btrfsMember finds out which of its devices a device is.
func btrfsMember(dir *os.File, fs *btrfsFSInfo, device int) (*btrfsDevInfo, error) {
	var want unix.Stat_t
	if err := unix.Fstat(device, &want); err != nil {
		return nil, err
	}
	for id := uint64(1); id <= min(fs.MaxID, btrfsMostDevices); id++ {
		info := btrfsDevInfo{DevID: id}
		if _, err := ioctl(fdOf(dir), btrfsIocDevInfo, &info); err != nil {
			continue // there is no such device, or not any more
		}
		// With one device there is no choice, and its name may be of another
		// mount namespace.
		var is unix.Stat_t
		path := string(info.Path[:max(bytes.IndexByte(info.Path[:], 0), 0)])
		if fs.Devices == 1 || unix.Stat(path, &is) == nil && is.Rdev == want.Rdev {
			return &info, nil
		}
	}
	return nil, fmt.Errorf("the device %d:%d is none of the %d devices of this btrfs", unix.Major(want.Rdev), unix.Minor(want.Rdev), fs.Devices)
}
