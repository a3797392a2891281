package openers

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// dmStatus is struct dm_ioctl of the kernel's <linux/dm-ioctl.h>.
type dmStatus struct {
	version             [3]uint32
	size, start, target uint32
	openCount           int32
	flags, event, _     uint32
	device              uint64
	name                [128]byte
	uuid                [129]byte
	_                   [7]byte
}

// dmDevStatus is DM_DEV_STATUS of the same header.
const dmDevStatus = 3<<30 | unsafe.Sizeof(dmStatus{})<<16 | 0xfd<<8 | 7

// countsAsFree reports whether device mapper itself counts no other opener of one of its devices. It
// is not known of other devices.
func countsAsFree(file File, own int) (free, known bool) {
	if !file.Block {
		return false, false
	}
	opens, err := dmOpenCount(file)
	return err == nil && opens == own, err == nil
}

func dmOpenCount(file File) (int, error) {
	if _, err := os.Stat("/sys/dev/block/" + Number(file.Major, file.Minor) + "/dm"); err != nil {
		return 0, err
	}
	control, err := os.OpenFile("/dev/mapper/control", os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer func() { _ = control.Close() }()
	request := dmStatus{version: [3]uint32{4, 0, 0}, device: unix.Mkdev(file.Major, file.Minor)}
	request.size = uint32(unsafe.Sizeof(request))
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, control.Fd(), dmDevStatus, uintptr(unsafe.Pointer(&request))) //nolint:gosec // the kernel's structure
	if errno != 0 {
		return 0, errno
	}
	return int(request.openCount), nil
}
