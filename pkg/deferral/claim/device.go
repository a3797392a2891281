package claim

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// DevicePolicy is which devices a caller may hand over.
type DevicePolicy struct {
	// Roots are the directories below which device nodes are accepted.
	Roots []string
	// Images are the directories below which disk images are accepted.
	Images []string
	// Classes are the block drivers, as /proc/devices names them, whose devices are accepted; none accepts all.
	Classes []string
	// Servers are programs that serve a device and so have it open, such as rbd-nbd: they do not count as its users.
	Servers []string
}

// OpenedDevice is a backing path that was resolved once. Later checks use the descriptor, never the name.
type OpenedDevice struct {
	volume.Device
	// FD is an O_PATH descriptor of the device.
	FD    int
	known bool // it was checked before, and is on record
	// loop is a descriptor of a loop device until that is claimed, or 0: to close the last one of a
	// device has the kernel drop what it has cached of it.
	loop int
}

// Close closes the descriptor.
func (d *OpenedDevice) Close() {
	d.closeLoop()
	sys.CloseFD(d.FD)
}

func (d *OpenedDevice) closeLoop() {
	if d.loop > 0 {
		sys.CloseAlone(d.loop)
		d.loop = 0
	}
}

// Open resolves a backing path below its allowed root and identifies the device.
func (p DevicePolicy) Open(target, backing string) (*OpenedDevice, error) {
	fd, image, err := p.openPath(target, path.Clean(backing))
	if err != nil {
		return nil, err
	}
	dev := &OpenedDevice{FD: fd}
	if dev.Device, err = p.identify(target, backing, fd, image); err != nil {
		sys.CloseFD(fd)
		return nil, err
	}
	return dev, nil
}

func deviceError(kind volume.Kind, target, backing, what string, err error) error {
	if err == nil {
		return volume.Errorf(kind, "volume %s: the device %s %s", target, sys.Clip(backing), what)
	}
	return volume.Errorf(kind, "volume %s: the device %s %s: %w", target, sys.Clip(backing), what, err)
}

// openPath opens the path below the root that it is named under, and reports whether that is a
// root of images. Roots may lie in one another: the path then has to stay below one of them.
func (p DevicePolicy) openPath(target, backing string) (fd int, image bool, err error) {
	for i, root := range slices.Concat(p.Images, p.Roots) {
		rel, ok := sys.Below(path.Clean(root), backing)
		if !ok {
			continue
		}
		fd, openErr := openUnder(root, rel)
		if openErr == nil {
			return fd, i < len(p.Images), nil
		}
		err = cmp.Or(err, openDeviceError(target, backing, root, openErr))
	}
	if err == nil {
		err = volume.Errorf(volume.Denied, "volume %s: the device %s lies below none of the directories that "+
			"devices.roots and devices.images allow (%s)", target, sys.Clip(backing), strings.Join(slices.Concat(p.Roots, p.Images), ", "))
	}
	return sys.NoFD, false, err
}

func openUnder(root, rel string) (int, error) {
	dir, err := sys.OpenDir(root)
	if err != nil {
		return sys.NoFD, err
	}
	defer sys.CloseFD(dir)
	// Devices are named by links such as /dev/disk/by-id/*, which may lead anywhere below the root and nowhere else.
	return sys.OpenBeneath(dir, rel, unix.O_PATH, 0)
}

func openDeviceError(target, backing, root string, err error) error {
	switch {
	case errors.Is(err, unix.EXDEV), errors.Is(err, unix.ELOOP):
		return deviceError(volume.Denied, target, backing, "is reached through a link that leads out of "+root, err)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return deviceError(volume.NotFound, target, backing, "does not exist: has the driver attached it?", err)
	default:
		return deviceError(volume.Internal, target, backing, "cannot be opened", err)
	}
}

func (p DevicePolicy) identify(target, backing string, fd int, image bool) (volume.Device, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return volume.Device{}, deviceError(volume.Internal, target, backing, "cannot be examined", err)
	}
	dev := deviceAs(openers.FileOf(&st))
	switch {
	case dev.Kind == volume.BlockDevice:
		if err := p.checkClass(target, backing, dev.Major); err != nil {
			return volume.Device{}, err
		}
		if dev.Path = openers.NodeOf(identityOf(dev)); dev.Path != "" {
			return dev, nil
		}
	case dev.Kind == volume.ImageFile && !image:
		return volume.Device{}, deviceError(volume.Denied, target, backing,
			"is a regular file: disk images are taken only below devices.images", nil)
	case dev.Kind == "":
		return volume.Device{}, deviceError(volume.Invalid, target, backing, "is no block device", nil)
	}
	name, err := sys.PathOfFD(fd)
	if err != nil {
		return volume.Device{}, deviceError(volume.Internal, target, backing, "has no name", err)
	}
	dev.Path = name
	return dev, nil
}

func (p DevicePolicy) checkClass(target, backing string, major uint32) error {
	if len(p.Classes) == 0 {
		return nil
	}
	class, err := blockClass(major)
	if err != nil {
		return deviceError(volume.Internal, target, backing, "has no known class", err)
	}
	if !slices.Contains(p.Classes, class) {
		return deviceError(volume.Denied, target, backing, fmt.Sprintf(
			"is of the class %q, which devices.classes does not allow (%s)", class, strings.Join(p.Classes, ", ")), nil)
	}
	return nil
}

// blockClass is the driver name of a block major in /proc/devices, whose last part lists the block devices.
func blockClass(major uint32) (string, error) {
	raw, err := os.ReadFile("/proc/devices")
	if err != nil {
		return "", err
	}
	_, blocks, _ := strings.Cut(string(raw), "Block devices:\n")
	for line := range strings.Lines(blocks) {
		if fields := strings.Fields(line); len(fields) == 2 && fields[0] == strconv.FormatUint(uint64(major), 10) {
			return fields[1], nil
		}
	}
	return "", fmt.Errorf("block major %d is not in /proc/devices", major)
}

// openBlock opens the block device itself: by the kernel's name, if that is still the device that was checked, and
// otherwise through the descriptor. A descriptor that was opened through a driver's bind mount would keep the driver
// from unmounting that. The mode is read-only: an O_EXCL claim does not depend on it, and closing a writer would make
// udev probe the device.
func (d *OpenedDevice) openBlock(flags int) (int, error) {
	fd, err := openByIdentity(d.Device, flags)
	if err == nil || errors.Is(err, unix.EBUSY) {
		return fd, err
	}
	return unix.Open(sys.ProcFD(d.FD), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|flags, 0)
}

// Identify returns the device that a path leads to now; its kind is empty if there is
// none, or the path leads to a filesystem whose server may hang.
func Identify(path string) volume.Device {
	device, _ := identify(path)
	return device
}

func identify(path string) (volume.Device, error) {
	device, err := sys.Look(&paths, path, func() (device volume.Device, err error) {
		if _, node := sys.Below("/dev", path); !node {
			if remote, err := sys.IsRemote(path); remote || err != nil {
				return device, cmp.Or(err, sys.ErrHangs)
			}
		}
		var st unix.Stat_t
		err = unix.Stat(path, &st)
		return deviceAs(openers.FileOf(&st)), err
	})
	device.Path = path
	return device, err
}

// paths are looks at paths that others have chosen.
var paths sys.Looks[string]

// deviceAs returns the device of an identity; its kind is empty if it is none.
func deviceAs(id identity) volume.Device {
	d := volume.Device{Major: id.Major, Minor: id.Minor, Inode: id.Inode}
	switch {
	case id.Block:
		d.Kind = volume.BlockDevice
	case id != (identity{}):
		d.Kind = volume.ImageFile
	}
	return d
}

// DeviceSize returns the current size of a device in bytes. That of a block device is in
// sysfs: a seek would wait for the end of a discard of the device.
func DeviceSize(d volume.Device) (size int64, known bool) {
	if d.Kind == volume.BlockDevice {
		line, err := sys.ReadLine(blockDevices + openers.Number(d.Major, d.Minor) + "/size")
		if err != nil {
			return 0, false
		}
		sectors, err := strconv.ParseInt(line, 10, 64)
		return sectors * 512, err == nil && sectors > 0 && sectors < 1<<54
	}
	if d.Kind != volume.ImageFile {
		return 0, false // Identify would not look there either
	}
	st, err := sys.Look(&paths, d.Path, func() (st unix.Stat_t, err error) { return st, unix.Lstat(d.Path, &st) })
	return st.Size, err == nil && openers.FileOf(&st) == identityOf(d) && st.Size > 0
}

// luksHeader is what cryptsetup takes for the header of LUKS2 unless it is told otherwise. That of LUKS1 is smaller.
const luksHeader = 16 << 20

// HeaderSize returns how many bytes a device may lack of what is below it: the header of LUKS, if it is a mapping of that.
func HeaderSize(d volume.Device) int64 { return headerIn(blockDevices, d) }

func headerIn(sysfs string, d volume.Device) int64 {
	uuid, _ := sys.ReadLine(sysfs + openers.Number(d.Major, d.Minor) + "/dm/uuid")
	if d.Kind == volume.BlockDevice && strings.HasPrefix(uuid, "CRYPT-LUKS") {
		return luksHeader
	}
	return 0
}

// openByIdentity opens a device by its name on record, if that is still the device.
func openByIdentity(d volume.Device, flags int) (int, error) {
	fd, err := unix.Open(d.Path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC|flags, 0)
	if err != nil {
		return sys.NoFD, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || openers.FileOf(&st) != identityOf(d) {
		sys.CloseFD(fd)
		return sys.NoFD, errors.Join(err, fmt.Errorf("%s is not %s any more", d.Path, d))
	}
	return fd, nil
}

// openAgain opens a device by its name on record or, if that is gone, by the kernel's own.
func openAgain(d volume.Device) (int, error) {
	fd, err := openByIdentity(d, 0)
	if node := openers.NodeOf(identityOf(d)); err != nil && node != "" { // an image has none
		d.Path = node
		return openByIdentity(d, 0)
	}
	return fd, err
}

// isGone reports whether a device could not be opened because it does not exist any more. Any other
// error, or a missing name, proves nothing about the device.
func isGone(d volume.Device, err error) bool {
	if d.Kind == volume.BlockDevice {
		return openers.IsGone(identityOf(d), err)
	}
	// An image was removed if its directory is there, and of the same filesystem.
	var dir, file unix.Stat_t
	return unix.Stat(path.Dir(d.Path), &dir) == nil && dir.Dev == unix.Mkdev(d.Major, d.Minor) &&
		(errors.Is(unix.Lstat(d.Path, &file), unix.ENOENT) || openers.FileOf(&file) != identityOf(d) && file.Mode != 0)
}

// HasVanished reports whether the kernel has a block device no more, which a descriptor that is open does not show.
func HasVanished(d volume.Device) bool {
	return d.Kind == volume.BlockDevice && errors.Is(unix.Access(blockDevices+openers.Number(d.Major, d.Minor), unix.F_OK), unix.ENOENT) &&
		unix.Access(blockDevices, unix.F_OK) == nil
}

// OpenDevice opens the device of a volume for reading, claimed or not, and bypasses the page cache if possible.
// Close it soon, with sys.CloseFileAlone: an open device cannot be detached.
func OpenDevice(d volume.Device) (*os.File, error) {
	fd, err := openByIdentity(d, unix.O_DIRECT)
	if errors.Is(err, unix.EINVAL) {
		fd, err = openByIdentity(d, 0) // an image on a filesystem without direct I/O
	}
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), d.Path), nil
}
