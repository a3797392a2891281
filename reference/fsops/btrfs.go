package fsops

import (
	"bytes"
	"fmt"

	"golang.org/x/sys/unix"
)

// What the kernel's linux/btrfs.h says.
const (
	btrfsIocResize      = 0x50009403
	btrfsIocDevInfo     = 0xd000941e
	btrfsIocFSInfo      = 0x8400941f
	btrfsIocGetDevStats = 0xc4089434
)

// btrfsMostDevices bounds a look at all devices.
const btrfsMostDevices = 1024

// btrfsCounters are the names of btrfsDevStats.Values.
var btrfsCounters = [...]string{"write errors", "read errors", "flush errors", "corruptions", "wrong generations"}

type btrfsFSInfo struct {
	MaxID, Devices uint64
	FSID           [16]byte
	Node, Sector   uint32
	_              [984]byte
}

type btrfsDevStats struct {
	DevID, Items, Flags uint64
	Values              [len(btrfsCounters)]uint64
	_                   [121]uint64
}

type btrfsDevInfo struct {
	DevID      uint64
	UUID       [16]byte
	BytesUsed  uint64
	TotalBytes uint64
	_          [379]uint64
	Path       [1024]byte
}

type btrfsVolArgs struct {
	FD   int64
	Name [4088]byte
}

// btrfsDevices asks a btrfs for its devices.
func btrfsDevices(dir int) (fs btrfsFSInfo, all []btrfsDevInfo, err error) {
	if _, err := ioctl(dir, btrfsIocFSInfo, &fs); err != nil {
		return fs, nil, fmt.Errorf("ask btrfs for its devices: %w", err)
	}
	for id := uint64(1); id <= min(fs.MaxID, btrfsMostDevices); id++ {
		info := btrfsDevInfo{DevID: id}
		if _, err := ioctl(dir, btrfsIocDevInfo, &info); err == nil { // else there is no such device, or not any more
			all = append(all, info)
		}
	}
	return fs, all, nil
}

// number is that of the device which has the kernel's name for it.
func (info *btrfsDevInfo) number() (uint64, error) {
	path, _, _ := bytes.Cut(info.Path[:], []byte{0})
	var st unix.Stat_t
	err := unix.Stat(string(path), &st)
	return uint64(st.Rdev), err //nolint:unconvert // narrower on other architectures
}
