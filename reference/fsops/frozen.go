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

// errNobodyHasIt says that no process is known by which the filesystem can be reached.
var errNobodyHasIt = errors.New("its watchdogs have been killed, and no process has it mounted: mount its device and run " +
	"fsfreeze --unfreeze there")

// mountable are the filesystems that can be reached when nobody has them mounted any
// more. A frozen one is kept by the kernel, and to mount it again gives just that one,
// whatever the options say. The options are such that no other filesystem can be
// mounted with them: not the one that has the device by now.
var mountable = map[string][]string{
	"ext4": {"sb=4294967295"},                  // there is no superblock
	"xfs":  {"sunit=8", "swidth=8", "noalign"}, // these exclude each other
}

// openFrozen opens the root directory of a filesystem, by its watchdogs, by the
// descriptor that the caller has, or by any process that has it mounted.
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
		// Only now it is certain whose it was: a pid may be used again.
		if dog.Lives() {
			return found, nil
		}
		_ = found.Close()
	}
	return nil, errNobodyHasIt
}

// openNamed opens a root directory anew, if it is that of the filesystem of this name.
func openNamed(root int, name string) (*os.File, error) {
	if root < 0 {
		return nil, errNobodyHasIt
	}
	if is, err := recordName(root); err != nil || is != name {
		return nil, errors.Join(errNobodyHasIt, err)
	}
	return openDir(root, ".")
}

// openMounted opens a filesystem where any process of the machine has it mounted.
func openMounted(name string) (*os.File, error) {
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	seen := make(map[string]bool)
	for _, process := range processes {
		ns, err := os.Readlink(process + "/ns/mnt")
		if err != nil || seen[ns] {
			continue // it has ended, or we may not look at it
		}
		seen[ns] = true
		if found := openMountedBy(process, name); found != nil {
			return found, nil
		}
	}
	return nil, errNobodyHasIt
}

// openMountedBy opens a filesystem as one process has it mounted, or gives nil. What
// the process calls by the path of a mount may be something else by now: what was
// opened is what counts.
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

// openLeft opens a frozen filesystem that was unmounted everywhere. ErrNotFrozen: its
// device has gone, or nobody uses it.
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
		for _, access := range []string{"rw", "ro"} { // it has to be as it was
			if found, err := mountAgain(kind, device, append([]string{access}, options...)); err == nil {
				return found, nil
			}
		}
	}
	return nil, errNobodyHasIt
}

// mountAgain mounts, where nobody sees it, a filesystem that the kernel has still.
func mountAgain(kind, device string, options []string) (*os.File, error) {
	mount, err := NewMount(kind, device, options, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(mount) }()
	return openDir(mount, ".")
}
