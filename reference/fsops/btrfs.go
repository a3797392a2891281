package fsops

import (
	"bytes"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// From the kernel's linux/btrfs.h.
const (
	btrfsIocResize      = 0x50009403
	btrfsIocForgetDev   = 0x50009405
	btrfsIocDevInfo     = 0xd000941e
	btrfsIocFSInfo      = 0x8400941f
	btrfsIocGetDevStats = 0xc4089434
)

// btrfsMostDevices bounds how many device ids are tried.
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

func btrfsDevices(dir int) (fs btrfsFSInfo, all []btrfsDevInfo, err error) {
	if _, err := Ioctl(dir, btrfsIocFSInfo, &fs); err != nil {
		return fs, nil, fmt.Errorf("ask btrfs for its devices: %w", err)
	}
	for id := uint64(1); id <= min(fs.MaxID, btrfsMostDevices); id++ {
		info := btrfsDevInfo{DevID: id}
		if _, err := Ioctl(dir, btrfsIocDevInfo, &info); err == nil { // else there is no such device, or not any more
			all = append(all, info)
		}
	}
	return fs, all, nil
}

// number returns the device number of the path under which btrfs knows the device.
func (info *btrfsDevInfo) number() (uint64, error) {
	path, _, _ := bytes.Cut(info.Path[:], []byte{0})
	var st unix.Stat_t
	err := unix.Stat(string(path), &st)
	return uint64(st.Rdev), err //nolint:unconvert // narrower on other architectures
}

// Forget makes the kernel forget which btrfs it saw on a device that is not mounted. If another disk had that device
// number, in a btrfs of several devices, the kernel would refuse to mount what is on the device now.
func Forget(path, fsType string) error {
	if fsType != "btrfs" {
		return nil
	}
	control, err := os.OpenFile("/dev/btrfs-control", os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) { // the kernel has seen no btrfs yet
		return nil
	}
	if err != nil {
		return fmt.Errorf("have the kernel forget the btrfs of %s: %w", path, err)
	}
	defer func() { _ = control.Close() }()
	args := btrfsVolArgs{}
	if copy(args.Name[:len(args.Name)-1], path) < len(path) {
		return fmt.Errorf("the path %s is too long", path)
	}
	_, err = Ioctl(fdOf(control), btrfsIocForgetDev, &args)
	if err == nil || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EBUSY) { // nothing to forget, or mounted
		return nil
	}
	return fmt.Errorf("have the kernel forget the btrfs of %s: %w", path, err)
}
