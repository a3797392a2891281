package openers

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

const (
	// loopMajor is LOOP_MAJOR of the kernel's <linux/major.h>.
	loopMajor = 7
	// maxLayers bounds how many loop devices over one another are followed.
	maxLayers = 16
)

// IsLoop reports whether a device is a loop device.
func IsLoop(file File) bool { return file.Block && file.Major == loopMajor }

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
