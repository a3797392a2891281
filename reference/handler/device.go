package handler

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// OpenDevice opens the volume's device and sees that it is the one that the broker
// claimed. While it is open its number cannot be given to another one.
func OpenDevice(info abi.Info) (int, error) {
	mode := unix.O_RDWR
	if info.ReadOnly() {
		mode = unix.O_RDONLY
	}
	fd, err := unix.Open(info.Device, mode|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("the device %s cannot be opened: %w", info.Device, err)
	}
	if err := checkDevice(fd, info); err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func checkDevice(fd int, info abi.Info) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("the device %s cannot be looked at: %w", info.Device, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return fmt.Errorf("%s is not a block device: attach an image file to a loop device and hand that over", info.Device)
	}
	major, minor, known, err := info.DeviceNumber()
	if err != nil {
		return err
	}
	if known && unix.Mkdev(major, minor) != st.Rdev {
		return fmt.Errorf("%s is another device now (%d:%d) than the one of the volume (%d:%d)",
			info.Device, unix.Major(st.Rdev), unix.Minor(st.Rdev), major, minor)
	}
	return nil
}

const (
	// busyTime is how long a device may be in use by an attempt that was killed or by a
	// sandbox that has just ended: the kernel unmounts a filesystem some time after its
	// last process has gone.
	busyTime = 3 * time.Second
	busyPoll = 20 * time.Millisecond
)

// RefuseMounted refuses a device whose filesystem is mounted anywhere already,
// also in a mount namespace that nobody sees: a second read-write owner, who would
// get the same filesystem from the kernel without a word.
func RefuseMounted(info abi.Info) error {
	fd, err := claim(info, unix.O_RDONLY)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// ClaimDevice opens the device for writing, as OpenDevice does, and so that as long as
// the descriptor is open nobody else mounts or claims it.
func ClaimDevice(info abi.Info) (int, error) {
	fd, err := claim(info, unix.O_RDWR)
	if err != nil {
		return -1, err
	}
	if err := checkDevice(fd, info); err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func claim(info abi.Info, mode int) (fd int, err error) {
	for until := time.Now().Add(busyTime); ; time.Sleep(busyPoll) {
		fd, err = unix.Open(info.Device, mode|unix.O_EXCL|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(until) {
			break
		}
	}
	if errors.Is(err, unix.EBUSY) {
		return -1, fmt.Errorf("the device %s is in use: another sandbox, which may be ending, or this node has it mounted; "+
			"find out with `grep -l %s /proc/[0-9]*/mountinfo`", info.Device, info.Device)
	}
	if err != nil {
		return -1, fmt.Errorf("the device %s cannot be claimed: %w", info.Device, err)
	}
	return fd, nil
}
