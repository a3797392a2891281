package loopdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Attached is a loop device over a known backing.
type Attached struct {
	Path     string
	ReadOnly bool
	// Leaving: it goes away by itself when its last user closes it.
	Leaving bool
}

// looks are at loop devices: the kernel asks the filesystem of the backing file, which may hang.
var looks sys.Looks[string]

// Over finds the loop devices over a file that were attached by the last element of its path: the rest differs
// between mount namespaces. Those of other files are not opened, because the filesystem of such a file may hang.
func Over(path string) ([]Attached, error) {
	var want unix.Stat_t
	if err := unix.Stat(path, &want); err != nil {
		return nil, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	disks, err := os.ReadDir("/sys/block")
	if err != nil {
		return nil, fmt.Errorf("look for loop devices: %w", err)
	}
	var found []Attached
	for _, disk := range disks {
		if !strings.HasPrefix(disk.Name(), "loop") || !mayBeOver(disk.Name(), filepath.Base(path)) {
			continue
		}
		device := "/dev/" + disk.Name()
		info, err := bound(
			func() (*unix.LoopInfo64, error) { return look(device) },
			func() bool { return mayBeOver(disk.Name(), filepath.Base(path)) },
		)
		if err != nil {
			return nil, fmt.Errorf("look at %s: %w", device, err)
		}
		if info == nil {
			continue
		}
		if info.Device == want.Dev && info.Inode == want.Ino {
			found = append(found, Attached{
				Path: device, ReadOnly: info.Flags&unix.LO_FLAGS_READ_ONLY != 0, Leaving: info.Flags&unix.LO_FLAGS_AUTOCLEAR != 0,
			})
		}
	}
	return found, nil
}

// mayBeOver reports whether a disk is a loop device over a file of this name, which may be too long for the kernel.
func mayBeOver(disk, name string) bool {
	raw, err := os.ReadFile("/sys/block/" + disk + "/loop/backing_file") //nolint:gosec // a file of the kernel's
	return errors.Is(err, syscall.ENAMETOOLONG) || err == nil && strings.HasSuffix(string(raw), "/"+name+"\n")
}

// freeing and freeingPause bound the wait for a device that is being freed, and answers ENXIO or EBUSY until it is.
const (
	freeing      = 100
	freeingPause = 20 * time.Millisecond
)

// bound looks at a device until the kernel has freed it. It returns nil if it is not over the file any more.
func bound(look func() (*unix.LoopInfo64, error), mayBeOver func() bool) (info *unix.LoopInfo64, err error) {
	for range freeing {
		if info, err = look(); err == nil {
			return info, nil
		}
		if !mayBeOver() {
			return nil, nil //nolint:nilnil // freed since
		}
		if !errors.Is(err, unix.ENXIO) && !errors.Is(err, unix.EBUSY) {
			break
		}
		time.Sleep(freeingPause)
	}
	return nil, err
}

func look(device string) (*unix.LoopInfo64, error) {
	return sys.Look(&looks, device, func() (*unix.LoopInfo64, error) {
		loop, err := os.OpenFile(device, os.O_RDONLY|unix.O_NONBLOCK, 0) //nolint:gosec // a name from the kernel
		if err != nil {
			return nil, err
		}
		defer func() { _ = loop.Close() }()
		return unix.IoctlLoopGetStatus64(int(loop.Fd()))
	})
}
