package main

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// These are of the kernel's <linux/dm-ioctl.h>.
const (
	createDevice, suspendDevice, deviceStatus, loadTable = 3, 6, 7, 9
	controlType                                          = 0xfd
)

// request is a struct dm_ioctl with room for a table of one target.
type request struct {
	version              [3]uint32
	size, start, targets uint32
	openCount            int32
	flags, event, _      uint32
	device               uint64
	name                 [128]byte
	uuid                 [129]byte
	_                    [7]byte
	sectorStart, sectors uint64
	status               int32
	next                 uint32
	kind                 [16]byte
	parameters           [64]byte
}

const headerSize = unsafe.Offsetof(request{}.sectorStart)

func newRequest() *request {
	r := &request{version: [3]uint32{4, 0, 0}, start: uint32(headerSize)}
	r.size = uint32(unsafe.Sizeof(*r))
	copy(r.name[:], "tested")
	return r
}

func (r *request) send(command uintptr) error {
	control, err := os.OpenFile("/dev/mapper/control", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = control.Close() }()
	number := 3<<30 | headerSize<<16 | controlType<<8 | command
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, control.Fd(), number, uintptr(unsafe.Pointer(r))); errno != 0 {
		return fmt.Errorf("request %d of device mapper: %w", command, errno)
	}
	return nil
}

// createLinear makes a device that is the first MiB of another one.
func createLinear(under string) error {
	table := newRequest()
	table.targets, table.sectors = 1, 2048
	copy(table.kind[:], "linear")
	copy(table.parameters[:], under+" 0")
	err := newRequest().send(createDevice)
	if err == nil {
		err = table.send(loadTable)
	}
	return errors.Join(err, newRequest().send(suspendDevice)) // without the flag to suspend, it resumes
}

// openCount is how often device mapper counts the device as open.
func openCount() (int, error) {
	r := newRequest()
	err := r.send(deviceStatus)
	return int(r.openCount), err
}
