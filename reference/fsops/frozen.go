package fsops

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/process"
)

// errNobodyHasIt: no process is known through which the filesystem can be reached.
var errNobodyHasIt = errors.New("its watchdogs have been killed, and no process has it mounted: mount its device and run " +
	"fsfreeze --unfreeze there")

// mountable lists the filesystems that can be reached although they are mounted nowhere.
// The kernel keeps a frozen one, and a mount of its device returns it whatever the options
// are. These options let the mount of any other filesystem fail: the device may hold a
// different one by now.
var mountable = map[string][]string{
	"ext4": {"sb=4294967295"},                  // there is no superblock at that block
	"xfs":  {"sunit=8", "swidth=8", "noalign"}, // sunit excludes noalign
}

// openFrozen opens the root directory of a filesystem: through one of its watchdogs, the
// caller's descriptor, or any process that has it mounted.
func openFrozen(dogs []process.Process, root int, name string) (*os.File, error) {
	if found, err := openHeld(dogs); err == nil {
		return found, nil
	}
	if found, err := openNamed(root, name); err == nil {
		return found, nil
	}
	if found, err := openMounted(name); err == nil {
		return found, nil
	}
	return openLeft(name)
}

// openHeld opens the root directory that a watchdog holds.
func openHeld(dogs []process.Process) (*os.File, error) {
	for _, dog := range dogs {
		found, err := os.OpenFile(fmt.Sprintf("/proc/%d/fd/%d", dog.PID, rootFD), os.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			continue
		}
		// Check only now that it is the watchdog's: the pid may have been reused.
		if dog.Lives() {
			return found, nil
		}
		_ = found.Close()
	}
	return nil, errNobodyHasIt
}

// openNamed opens a root directory again if it belongs to the filesystem of this name.
func openNamed(root int, name string) (*os.File, error) {
	if root < 0 {
		return nil, errNobodyHasIt
	}
	if is, err := recordName(root); err != nil || is != name {
		return nil, errors.Join(errNobodyHasIt, err)
	}
	return openDir(root, ".")
}

// openMounted opens a filesystem through any process that has it mounted.
func openMounted(name string) (*os.File, error) {
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	seen := make(map[string]bool)
	for _, process := range processes {
		ns, err := os.Readlink(process + "/ns/mnt")
		if err != nil || seen[ns] {
			continue // it has ended, or may not be examined
		}
		seen[ns] = true
		if found := openMountedBy(process, name); found != nil {
			return found, nil
		}
	}
	return nil, errNobodyHasIt
}

// openMountedBy opens a filesystem through the mounts of one process, or returns nil. The
// path of a mount may lead elsewhere by now, so the opened directory is checked.
func openMountedBy(process, name string) *os.File {
	table, err := os.Open(process + "/mountinfo") //nolint:gosec // the kernel's own file
	if err != nil {
		return nil
	}
	defer func() { _ = table.Close() }()
	mounts, err := mountinfo.GetMountsFromReader(table, func(m *mountinfo.Info) (skip, stop bool) {
		isBtrfs := strings.HasPrefix(name, "btrfs-") && m.FSType == "btrfs"
		return !isBtrfs && fmt.Sprintf("device-%d-%d", m.Major, m.Minor) != name, false
	})
	if err != nil || len(mounts) == 0 {
		return nil
	}
	root, err := unix.Open(process+"/root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer func() { _ = unix.Close(root) }()
	for _, m := range mounts {
		fd, err := unix.Openat2(root, m.Mountpoint, &unix.OpenHow{
			Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
		})
		if err != nil {
			continue
		}
		if is, err := recordName(fd); err == nil && is == name {
			return os.NewFile(uintptr(fd), m.Mountpoint)
		}
		_ = unix.Close(fd)
	}
	return nil
}

// openLeft opens a frozen filesystem that is no longer mounted anywhere. ErrNotFrozen: its
// device is gone, or is not in use.
func openLeft(name string) (*os.File, error) {
	number, ok := strings.CutPrefix(name, "device-")
	if !ok {
		return nil, errNobodyHasIt
	}
	link, err := os.Readlink("/sys/dev/block/" + strings.ReplaceAll(number, "-", ":"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("its device has gone: %w", ErrNotFrozen)
	}
	if err != nil {
		return nil, err
	}
	device := "/dev/" + strings.ReplaceAll(filepath.Base(link), "!", "/") // as the kernel names it
	fd, err := unix.Open(device, unix.O_RDONLY|unix.O_EXCL|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err == nil {
		return nil, errors.Join(fmt.Errorf("nobody has its device %s: %w", device, ErrNotFrozen), unix.Close(fd))
	}
	for kind, options := range mountable {
		for _, access := range []string{"rw", "ro"} { // the mode must match
			if found, err := mountAgain(kind, device, append([]string{access}, options...)); err == nil {
				return found, nil
			}
		}
	}
	return nil, errNobodyHasIt
}

// mountAgain mounts, detached, a filesystem that the kernel still has.
func mountAgain(kind, device string, options []string) (*os.File, error) {
	mount, err := NewMount(kind, device, options, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(mount) }()
	return openDir(mount, ".")
}
