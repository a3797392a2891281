package deferral

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// DevicePolicy says which devices a caller may hand over.
type DevicePolicy struct {
	// Roots are the directories below which device nodes are named.
	Roots []string
	// Images are the directories below which disk images may lie; with none, no
	// image is taken.
	Images []string
	// Classes are the block drivers, as /proc/devices names them, whose devices
	// are taken; with none, all are.
	Classes []string
}

// openedDevice is a backing path resolved once and held by descriptor: all that
// is asked of it later is asked of the descriptor, never of the name.
type openedDevice struct {
	Device
	fd    int  // O_PATH
	known bool // it was looked at before, and is on record
}

func (d *openedDevice) close() { closeFD(d.fd) }

// open resolves a backing path below its allowed root and says what it is.
func (p DevicePolicy) open(volume, backing string) (*openedDevice, error) {
	fd, image, err := p.openPath(volume, path.Clean(backing))
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		closeFD(fd)
		return nil, deviceError(Internal, volume, backing, "cannot be looked at", err)
	}
	dev := &openedDevice{fd: fd}
	dev.Device, err = p.identify(volume, backing, fd, &st, image)
	if err != nil {
		closeFD(fd)
		return nil, err
	}
	return dev, nil
}

func deviceError(kind Kind, volume, backing, what string, err error) error {
	if err == nil {
		return Errorf(kind, "volume %s: the device %s %s", volume, clip(backing), what)
	}
	return Errorf(kind, "volume %s: the device %s %s: %w", volume, clip(backing), what, err)
}

// openPath opens the path below the root it is named under.
func (p DevicePolicy) openPath(volume, backing string) (fd int, image bool, err error) {
	for _, images := range [...]bool{false, true} {
		roots := p.Roots
		if images {
			roots = p.Images
		}
		for _, root := range roots {
			rel, ok := below(path.Clean(root), backing)
			if !ok {
				continue
			}
			fd, err := openUnder(root, rel)
			if err != nil {
				return noFD, false, openDeviceError(volume, backing, root, err)
			}
			return fd, images, nil
		}
	}
	return noFD, false, Errorf(Denied, "volume %s: the device %s lies below none of the directories that "+
		"devices.roots and devices.images allow (%s)", volume, clip(backing), strings.Join(slices.Concat(p.Roots, p.Images), ", "))
}

func openUnder(root, rel string) (int, error) {
	dir, err := openDirPath(root)
	if err != nil {
		return noFD, err
	}
	defer closeFD(dir)
	// Links such as /dev/disk/by-id/* are how devices are named; they may lead
	// anywhere below the root and nowhere else.
	return openBeneath(dir, rel, unix.O_PATH, 0)
}

func openDeviceError(volume, backing, root string, err error) error {
	switch {
	case errors.Is(err, unix.EXDEV), errors.Is(err, unix.ELOOP):
		return deviceError(Denied, volume, backing, "is reached through a link that leads out of "+root, err)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return deviceError(NotFound, volume, backing, "does not exist: has the driver attached it?", err)
	default:
		return deviceError(Internal, volume, backing, "cannot be opened", err)
	}
}

func (p DevicePolicy) identify(volume, backing string, fd int, st *unix.Stat_t, image bool) (Device, error) {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		return p.blockDevice(volume, backing, fd, st.Rdev)
	case unix.S_IFREG:
		if !image {
			return Device{}, deviceError(Denied, volume, backing,
				"is a regular file: disk images are taken only below devices.images", nil)
		}
		return imageDevice(volume, backing, fd, st)
	case unix.S_IFCHR:
		return Device{}, deviceError(Invalid, volume, backing, "is a character device: a block device is needed", nil)
	case unix.S_IFDIR:
		return Device{}, deviceError(Invalid, volume, backing, "is a directory: a block device is needed", nil)
	default:
		return Device{}, deviceError(Invalid, volume, backing, "is no block device", nil)
	}
}

func (p DevicePolicy) blockDevice(volume, backing string, fd int, rdev uint64) (Device, error) {
	dev := Device{Kind: BlockDevice, Major: unix.Major(rdev), Minor: unix.Minor(rdev)}
	if err := p.checkClass(volume, backing, dev.Major); err != nil {
		return Device{}, err
	}
	name, err := kernelName(dev.Major, dev.Minor)
	if err != nil {
		name, err = pathOfFD(fd)
	}
	if err != nil {
		return Device{}, deviceError(Internal, volume, backing, "has no name", err)
	}
	dev.Path = name
	return dev, nil
}

// kernelName is the devtmpfs name of a block device. It cannot be moved by
// whoever owns the link that the caller named the device by. It counts only
// where it is that device in this mount namespace.
func kernelName(major, minor uint32) (string, error) {
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", major, minor))
	if err != nil {
		return "", err
	}
	name := "/dev/" + strings.ReplaceAll(path.Base(link), "!", "/")
	var st unix.Stat_t
	if err := unix.Lstat(name, &st); err != nil {
		return "", err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK || st.Rdev != unix.Mkdev(major, minor) {
		return "", fmt.Errorf("%s is another device", name)
	}
	return name, nil
}

func imageDevice(volume, backing string, fd int, st *unix.Stat_t) (Device, error) {
	name, err := pathOfFD(fd)
	if err != nil {
		return Device{}, deviceError(Internal, volume, backing, "has no name", err)
	}
	return Device{
		Kind: ImageFile, Path: name,
		Major: unix.Major(st.Dev), Minor: unix.Minor(st.Dev), Inode: st.Ino,
	}, nil
}

func (p DevicePolicy) checkClass(volume, backing string, major uint32) error {
	if len(p.Classes) == 0 {
		return nil
	}
	class, err := blockClass(major)
	if err != nil {
		return deviceError(Internal, volume, backing, "has no known class", err)
	}
	if !slices.Contains(p.Classes, class) {
		return deviceError(Denied, volume, backing, fmt.Sprintf(
			"is of the class %q, which devices.classes does not allow (%s)", class, strings.Join(p.Classes, ", ")), nil)
	}
	return nil
}

// blockClass is the driver name of a block major in /proc/devices.
func blockClass(major uint32) (string, error) {
	file, err := os.Open("/proc/devices")
	if err != nil {
		return "", err
	}
	defer func() { _ = file.Close() }()
	lines := bufio.NewScanner(file)
	inBlock := false
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) != 2 {
			continue
		}
		if fields[1] == "devices:" {
			inBlock = fields[0] == "Block"
			continue
		}
		if inBlock && fields[0] == strconv.FormatUint(uint64(major), 10) {
			return fields[1], nil
		}
	}
	return "", errors.Join(fmt.Errorf("block major %d is not in /proc/devices", major), lines.Err())
}

// openBlock opens the block device itself: by the kernel's own name for it, where
// that is still the device that was checked, or else through the descriptor. What
// is held open through a driver's bind mount keeps the driver from taking that
// away, and a claim can outlive the publish that it was made for. Read-only, because an O_EXCL claim does not depend on the mode and a
// closed writer would make udev probe the device.
func (d *openedDevice) openBlock(flags int) (int, error) {
	fd, err := openByIdentity(d.Device, flags)
	if err == nil || errors.Is(err, unix.EBUSY) {
		return fd, err
	}
	return unix.Open(procFD(d.fd), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|flags, 0)
}

// DeviceSize is the size in bytes of a volume's device now. The descriptor that
// holds the claim is asked where there is one: that is one quick call.
func (b *Broker) DeviceSize(v *Volume) (int64, bool) {
	b.claims.mu.Lock()
	held := b.claims.held[v.Device.identity()]
	b.claims.mu.Unlock()
	if held == nil {
		return sizeByName(v)
	}
	size, err := unix.Seek(held.fd, 0, unix.SEEK_END)
	return size, err == nil && size > 0
}

// sizeByName is for devices that are not held: images, and those of adopted
// volumes.
func sizeByName(v *Volume) (int64, bool) {
	fd, err := unix.Open(v.Device.Path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, false
	}
	defer closeFD(fd)
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || !v.Device.is(&st) {
		return 0, false
	}
	size, err := unix.Seek(fd, 0, unix.SEEK_END)
	return size, err == nil && size > 0
}

// is tells whether a file is this device.
func (d Device) is(st *unix.Stat_t) bool {
	if d.Kind == ImageFile {
		return st.Mode&unix.S_IFMT == unix.S_IFREG && st.Dev == unix.Mkdev(d.Major, d.Minor) && st.Ino == d.Inode
	}
	return st.Mode&unix.S_IFMT == unix.S_IFBLK && st.Rdev == unix.Mkdev(d.Major, d.Minor)
}

// same tells whether two devices are one, whatever they are called.
func (d Device) same(other Device) bool {
	return d.Kind == other.Kind && d.Major == other.Major && d.Minor == other.Minor && d.Inode == other.Inode
}
