package openers

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

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
