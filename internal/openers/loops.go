package openers

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

const (
	// loopMajor is LOOP_MAJOR of the kernel's <linux/major.h>.
	loopMajor = 7
	// maxLayers bounds how many loop devices over one another are followed.
	maxLayers = 16
)

// IsLoop reports whether a device is a loop device.
func IsLoop(file File) bool { return file.Block && file.Major == loopMajor }

// Layers returns the device and, if it is a loop device, what is under it: other loop devices, and at
// last an image or another block device. All of them are one disk. With an error, some are missing.
func Layers(file File) ([]File, error) {
	layers := []File{file}
	for len(layers) < maxLayers {
		info, err := loopInfo(file)
		if err != nil || info == nil {
			return layers, err
		}
		file = Backing(info)
		layers = append(layers, file)
	}
	return layers, fmt.Errorf("%d loop devices lie over one another", maxLayers)
}

// Backing returns the image, or the block device, that is under a loop device.
func Backing(info *unix.LoopInfo64) File {
	if info.Rdevice != 0 {
		return blockFile(info.Rdevice)
	}
	return File{Major: unix.Major(info.Device), Minor: unix.Minor(info.Device), Inode: info.Inode}
}

// loopInfo returns nil for a device that is no loop device, has no backing, or has gone.
func loopInfo(file File) (*unix.LoopInfo64, error) {
	if !IsLoop(file) {
		return nil, nil //nolint:nilnil // no loop device
	}
	node := NodeOf(file)
	if node == "" {
		return nil, fmt.Errorf("loop device %d has no node below /dev", file.Minor)
	}
	fd, err := unix.Open(node, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err == nil {
		defer sys.CloseFD(fd)
		var info *unix.LoopInfo64
		if info, err = unix.IoctlLoopGetStatus64(fd); err == nil {
			return info, nil
		}
	}
	if IsNoDevice(err) {
		return nil, nil //nolint:nilnil // it has no backing
	}
	return nil, fmt.Errorf("the image of loop device %d cannot be read: %w", file.Minor, err)
}

// IsNoDevice reports whether an open failed because there is no such file or no device behind it.
func IsNoDevice(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOMEDIUM)
}

// eachLoop calls see for each loop device but those to skip, until it wants no more. A loop device that
// has no backing, or no bytes, is not in the kernel's list of disks.
func eachLoop(skip []File, see func(loop File) (more bool, err error)) error {
	disks, err := os.ReadFile("/proc/partitions")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(disks)) {
		of := strings.Fields(line) // major, minor, size and name
		if len(of) != 4 || of[0] != strconv.Itoa(loopMajor) || !isLoopName(of[3]) {
			continue
		}
		minor, err := strconv.ParseUint(of[1], 10, 20)
		loop := File{Block: true, Major: loopMajor, Minor: uint32(minor)}
		if err != nil || slices.Contains(skip, loop) {
			continue
		}
		if more, err := see(loop); err != nil || !more {
			return err
		}
	}
	return nil
}

// isLoopName reports whether a name is that of a loop device, not of its partition.
func isLoopName(name string) bool {
	number, ok := strings.CutPrefix(name, "loop")
	_, err := strconv.ParseUint(number, 10, 32)
	return ok && err == nil
}
