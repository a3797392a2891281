package fsops

import (
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

func planBtrfs(dir *os.File, device int, size int64) (*plan, error) {
	fs, devices, err := btrfsDevices(fdOf(dir))
	if err != nil {
		return nil, err
	}
	var want unix.Stat_t
	if err := unix.Fstat(device, &want); err != nil {
		return nil, err
	}
	i := slices.IndexFunc(devices, func(info btrfsDevInfo) bool {
		// A single device needs no comparison. Its name may be one of another mount
		// namespace.
		number, err := info.number()
		return fs.Devices == 1 || err == nil && number == want.Rdev
	})
	if i < 0 {
		return nil, fmt.Errorf("the device %d:%d is none of the %d devices of this btrfs", unix.Major(want.Rdev), unix.Minor(want.Rdev), fs.Devices)
	}
	member := devices[i]
	sector := int64(max(fs.Sector, 512))
	return &plan{has: times(member.TotalBytes, 1), most: size / sector * sector, grow: func() error {
		args := btrfsVolArgs{}
		copy(args.Name[:], fmt.Sprintf("%d:max", member.DevID))
		// A positive result is an error too.
		busy, err := ioctl(fdOf(dir), btrfsIocResize, &args)
		if err == nil && busy != 0 {
			return fmt.Errorf("btrfs is at work on its devices (balance, replace or the like); try again when that has ended: %w", unix.EBUSY)
		}
		return err
	}}, nil
}
