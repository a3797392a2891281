package fsops

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/reference/process"
)

// errNobodyHasIt: no process is known through which the filesystem can be reached.
var errNobodyHasIt = errors.New("its watchdogs have been killed, and it cannot be mounted again: mount its device and run " +
	"fsfreeze --unfreeze there")

// mountable lists the options with which a filesystem can be opened that the kernel has, mounted or, being frozen, not:
// a mount of its device returns it whatever the options are. They let the mount of any other filesystem fail, or write
// nothing: the device may hold a different one by now. The mode must match, except that of a btrfs.
var mountable = []struct {
	kind    string
	options []string
}{
	{"ext4", []string{"rw", "sb=4294967295"}}, // there is no superblock at that block
	{"ext4", []string{"ro", "sb=4294967295"}},
	{"xfs", []string{"rw", "sunit=8", "swidth=8", "noalign"}}, // sunit excludes noalign
	{"xfs", []string{"ro", "sunit=8", "swidth=8", "noalign"}},
	{"btrfs", []string{"ro", "rescue=nologreplay"}},
}

// openFrozen opens a root directory: through a watchdog, the caller's descriptor, or another mount of its device.
func openFrozen(dogs []process.Process, root int, name string) (*os.File, error) {
	if found, err := openHeld(dogs); err == nil {
		return found, nil
	}
	if found, err := openNamed(root, name); err == nil {
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

// openLeft opens a frozen filesystem by its device. ErrNotFrozen: its device is gone, or is not in use.
func openLeft(name string) (*os.File, error) {
	device, err := deviceOf(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("its device has gone: %w", ErrNotFrozen)
	}
	if err != nil {
		return nil, err
	}
	fd, err := unix.Open(device, unix.O_RDONLY|unix.O_EXCL|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err == nil {
		return nil, errors.Join(fmt.Errorf("nobody has its device %s: %w", device, ErrNotFrozen), unix.Close(fd))
	}
	for _, as := range mountable {
		if strings.HasPrefix(name, "btrfs-") != (as.kind == "btrfs") {
			continue
		}
		mount, err := NewMount(as.kind, device, as.options, 0)
		if err != nil {
			continue
		}
		found, err := openNamed(mount, name)
		sys.CloseFD(mount)
		if err == nil {
			return found, nil
		}
	}
	return nil, errNobodyHasIt
}

// deviceOf returns the path of the device of a filesystem, which is the kernel's name of it.
func deviceOf(name string) (string, error) {
	var link string
	if number, ok := strings.CutPrefix(name, "device-"); ok {
		to, err := os.Readlink("/sys/dev/block/" + strings.ReplaceAll(number, "-", ":"))
		if err != nil {
			return "", err
		}
		link = to
	} else {
		// The kernel lists a btrfs for as long as it has it.
		id, _ := hex.DecodeString(strings.TrimPrefix(name, "btrfs-"))
		if len(id) != 16 {
			return "", errNobodyHasIt
		}
		devices, err := os.ReadDir(fmt.Sprintf("/sys/fs/btrfs/%x-%x-%x-%x-%x/devices", id[:4], id[4:6], id[6:8], id[8:10], id[10:]))
		if err != nil || len(devices) == 0 {
			return "", cmp.Or(err, errNobodyHasIt)
		}
		link = devices[0].Name()
	}
	return "/dev/" + strings.ReplaceAll(filepath.Base(link), "!", "/"), nil
}
