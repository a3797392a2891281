package openers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers/scan"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// File is what a device is: a block device by its number, or a regular file by its filesystem and
// inode. That of anything else is zero.
type File = scan.File

// Holder is a process that has a device open.
type Holder = scan.Holder

// FileOf returns what an examined file is.
func FileOf(st *unix.Stat_t) File {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		return File{Block: true, Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev)}
	case unix.S_IFREG:
		return File{Major: unix.Major(st.Dev), Minor: unix.Minor(st.Dev), Inode: st.Ino}
	}
	return File{}
}

// Number is how the kernel writes the number of a block device: "7:3".
func Number(major, minor uint32) string {
	return strconv.FormatUint(uint64(major), 10) + ":" + strconv.FormatUint(uint64(minor), 10)
}

// NodeOf returns the kernel's own name of a block device, which nobody can move; "" if that is not
// the device in this mount namespace.
func NodeOf(file File) string {
	link, err := os.Readlink("/sys/dev/block/" + Number(file.Major, file.Minor))
	if err != nil {
		return ""
	}
	name := "/dev/" + strings.ReplaceAll(path.Base(link), "!", "/")
	var st unix.Stat_t
	if err := unix.Lstat(name, &st); err != nil || FileOf(&st) != file {
		return ""
	}
	return name
}

// IsGone reports whether a block device could not be opened because it does not exist any more. One that has a size
// does: a disk is only offline, for example, and who had it open still has.
func IsGone(device File, err error) bool {
	size, missing := sys.ReadLine("/sys/dev/block/" + Number(device.Major, device.Minor) + "/size")
	return errors.Is(missing, unix.ENOENT) || size == "0" && IsNoDevice(err) && !errors.Is(err, unix.ENOENT)
}

// KernelUsers says for a person what may have a device open if no process has it.
func KernelUsers(file File) string {
	const other = "a mapping, io_uring, or a descriptor that is being passed"
	if !file.Block {
		return "the kernel itself (a loop device), " + other
	}
	return cmp.Or(userInKernel(file), "the kernel itself (a mount in another namespace, a loop or device-mapper device, swap), one of its partitions, "+other)
}

// userInKernel names a user in this node's kernel that is known to have the device open, or is "".
func userInKernel(file File) string {
	number := Number(file.Major, file.Minor)
	mounts, err := sys.MountPoints(context.Background(), sys.MountTable, func(device string) bool { return device == number })
	if points := mounts[number]; err == nil && len(points) > 0 {
		return "this node's kernel: " + NodeOf(file) + " is mounted at " + strings.Join(points[:min(maxNames, len(points))], ", ") + "; unmount it"
	}
	if upper, err := filepath.Glob("/sys/dev/block/" + number + "/holders/*"); err == nil && len(upper) > 0 {
		return "this node's kernel: " + NodeOf(file) + " is part of " + filepath.Base(upper[0])
	}
	return ""
}

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

const (
	// loopMajor is LOOP_MAJOR of the kernel's <linux/major.h>.
	loopMajor = 7
	// maxLayers bounds how many loop devices over one another are followed.
	maxLayers = 16
)

// IsLoop reports whether a device is a loop device. With the kernel's loop.max_part, their partitions have its major too.
func IsLoop(file File) bool {
	return file.Block && file.Major == loopMajor && attribute(file, "partition") == ""
}

// looks bounds calls on loop devices: even an open may wait for the backing file or device.
var looks sys.Looks[File]

// lookAt opens a loop device, by a descriptor of it if there is one, and looks at it.
func lookAt[V any](loop File, fd int, see func(fd int) (V, error)) (seen V, err error) {
	seen, err = sys.Look(&looks, loop, func() (seen V, err error) {
		var node string
		if fd != sys.NoFD {
			node = sys.ProcFD(fd)
		} else if node = NodeOf(loop); node == "" {
			return seen, errNoNode
		}
		fd, err := unix.Open(node, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return seen, err
		}
		defer sys.CloseFD(fd)
		return see(fd)
	})
	if err != nil {
		err = fmt.Errorf("%s: %w", loop, err)
	}
	return seen, err
}

var errNoNode = errors.New("it has no node below /dev")

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

// mayWait reports whether an open of a loop device may wait for its backing: it has I/O in flight, for
// example for its partitions, and its backing file has a name that none of the devices has.
func mayWait(loop File, devices []File) bool {
	busy := attribute(loop, "inflight")
	return strings.Trim(busy, " 0") != "" && !mayLieOn(loop, devices)
}

func mayLieOn(loop File, devices []File) bool {
	name := path.Base(attribute(loop, "loop/backing_file"))
	return name != "." && slices.ContainsFunc(devices, func(of File) bool {
		return of.Block && (name == path.Base(NodeOf(of)) || name == attribute(of, "dm/name"))
	})
}

// attribute reads a file of a device in sysfs; "" is that there is none.
func attribute(of File, name string) string {
	text, _ := os.ReadFile("/sys/dev/block/" + Number(of.Major, of.Minor) + "/" + name) //nolint:gosec // a file of the kernel's
	return strings.TrimSuffix(string(text), "\n")
}
