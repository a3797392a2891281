package loopdev

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Attached is a loop device over a known backing.
type Attached struct {
	Path     string
	ReadOnly bool
	// Leaving: it goes away by itself when its last user closes it.
	Leaving bool
}

// Over finds the loop devices over a file. The kernel is asked what each is made
// of: names of backing files differ between mount namespaces.
func Over(backing os.FileInfo) ([]Attached, error) {
	want, ok := backing.Sys().(*syscall.Stat_t)
	if !ok {
		return nil, fmt.Errorf("loop devices over %s: no file of the kernel's", backing.Name())
	}
	disks, err := os.ReadDir("/sys/block")
	if err != nil {
		return nil, fmt.Errorf("look for loop devices: %w", err)
	}
	var found []Attached
	for _, disk := range disks {
		path, bound := "/dev/"+disk.Name(), "/sys/block/"+disk.Name()+"/loop"
		if notThere(bound) {
			continue // it is none, or over nothing
		}
		info, err := status(path)
		if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENOENT) && notThere(bound) {
			continue // freed since
		}
		if err != nil {
			return nil, fmt.Errorf("look at %s: %w", path, err)
		}
		if info.Device == want.Dev && info.Inode == want.Ino {
			found = append(found, Attached{
				Path: path, ReadOnly: info.Flags&unix.LO_FLAGS_READ_ONLY != 0, Leaving: info.Flags&unix.LO_FLAGS_AUTOCLEAR != 0,
			})
		}
	}
	return found, nil
}

func notThere(path string) bool {
	_, err := os.Stat(path)
	return errors.Is(err, os.ErrNotExist)
}

func status(path string) (*unix.LoopInfo64, error) {
	loop, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) //nolint:gosec // a name from the kernel
	if err != nil {
		return nil, err
	}
	defer func() { _ = loop.Close() }()
	return unix.IoctlLoopGetStatus64(int(loop.Fd()))
}
