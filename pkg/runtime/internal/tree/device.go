package tree

import (
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// Identify tells what a device is, so that it can be told from our own.
func Identify(path string) deferral.Device {
	device := deferral.Device{Path: path}
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return device
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		device.Kind = deferral.BlockDevice
		device.Major, device.Minor = unix.Major(st.Rdev), unix.Minor(st.Rdev)
	case unix.S_IFREG:
		device.Kind = deferral.ImageFile
		device.Major, device.Minor, device.Inode = unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino
	}
	return device
}
