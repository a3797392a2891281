package handler

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
)

// SpecFile is the name of the spec in a container's bundle.
const SpecFile = "config.json"

// ReadSpec reads the spec of a container's bundle.
func ReadSpec(bundle string) (*specs.Spec, error) {
	raw, err := os.ReadFile(filepath.Join(bundle, SpecFile)) //nolint:gosec // what every runtime reads
	if err != nil {
		return nil, err
	}
	spec := new(specs.Spec)
	if err := json.Unmarshal(raw, spec); err != nil {
		return nil, fmt.Errorf("the bundle's %s: %w", SpecFile, err)
	}
	return spec, nil
}

// Attach calls mount once for each volume of a container, and then records the binding for
// the broker. process is stored as the note that identifies the sandbox later.
func Attach(found []*oci.Mount, binding oci.Binding, process any, mount func(m *oci.Mount) error) (err error) {
	if binding.Note, err = json.Marshal(process); err != nil {
		return err
	}
	done := make(map[string]bool)
	for _, m := range found {
		if done[m.Volume] {
			continue
		}
		done[m.Volume] = true
		if err := mount(m); err != nil {
			return VolumeError(m, err)
		}
		failpoint.Hit("volume-attached")
		if err := m.Bind(binding); err != nil {
			return VolumeError(m, fmt.Errorf("the broker cannot be told of the sandbox: %w", err))
		}
		failpoint.Hit("volume-bound")
	}
	return nil
}

// RefuseShared refuses a container with deferred volumes in whose mounts, of volumes or not, mounts would propagate to
// the node.
func RefuseShared(spec *specs.Spec) error {
	for _, m := range spec.Mounts {
		if slices.Contains(m.Options, "rshared") || slices.Contains(m.Options, "shared") {
			return fmt.Errorf("its mount at %s: what is mounted in it cannot be seen outside of a container with deferred volumes: "+
				"set mountPropagation to HostToContainer or None, or do not defer its volumes", m.Destination)
		}
	}
	return nil
}

// CloseAll closes all mounts.
func CloseAll(found []*oci.Mount) error {
	var errs []error
	for _, m := range found {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// VolumeError names the volume of a mount in an error.
func VolumeError(m *oci.Mount, err error) error {
	return fmt.Errorf("volume %s (for %s): %w", cmp.Or(m.Info.Target(), m.Volume), m.Destination, err)
}

// OpenPublished opens the device of a volume, by OpenDevice or ClaimDevice, and fails if the volume was released since it
// was found: the device may be another volume's by now. With the device open, the broker's claim cannot end after that.
func OpenPublished(dir *abi.Dir, info abi.Info, open func(abi.Info) (int, error)) (int, error) {
	fd, err := open(info)
	if err != nil {
		return -1, err
	}
	if _, err = dir.Info(); err == nil {
		return fd, nil
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w any more: it was released meanwhile", oci.ErrNoDirectory)
	}
	return -1, errors.Join(err, unix.Close(fd))
}

// OpenDevice opens the volume's device for reading and checks that it is the one that the
// broker claimed. Its number cannot be reused while it is open. A kernel can refuse to mount
// what somebody has open for writing, and to open for writing what is mounted.
func OpenDevice(info abi.Info) (int, error) {
	fd, err := unix.Open(info.Device, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("the device %s cannot be opened: %w", info.Device, err)
	}
	return checked(fd, info)
}

// checked returns the descriptor if it is of the volume's device, and else closes it.
func checked(fd int, info abi.Info) (int, error) {
	if err := checkDevice(fd, info); err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func checkDevice(fd int, info abi.Info) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("the device %s cannot be looked at: %w", info.Device, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return fmt.Errorf("%s is not a block device: attach an image file to a loop device and hand that over", info.Device)
	}
	major, minor, known, err := info.DeviceNumber()
	if err != nil {
		return err
	}
	if known && unix.Mkdev(major, minor) != st.Rdev {
		return fmt.Errorf("%s is another device now (%d:%d) than the one of the volume (%d:%d)",
			info.Device, unix.Major(st.Rdev), unix.Minor(st.Rdev), major, minor)
	}
	return nil
}

const (
	// busyTime is how long a device may still be in use after an attempt was killed or a sandbox has ended: the kernel
	// unmounts a filesystem some time after its last process has ended.
	busyTime = 3 * time.Second
	busyPoll = 20 * time.Millisecond
)

// RefuseMounted refuses a device whose filesystem is mounted in any mount namespace: the
// kernel would silently give the same filesystem to a second read-write owner.
func RefuseMounted(info abi.Info) error {
	fd, err := claim(info, unix.O_RDONLY)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// ClaimDevice is OpenDevice for writing. Nobody else can mount or claim the device while the descriptor is open.
func ClaimDevice(info abi.Info) (int, error) { return claim(info, unix.O_RDWR) }

func claim(info abi.Info, mode int) (fd int, err error) {
	for until := time.Now().Add(busyTime); ; time.Sleep(busyPoll) {
		fd, err = unix.Open(info.Device, mode|unix.O_EXCL|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(until) {
			break
		}
	}
	if errors.Is(err, unix.EBUSY) {
		return -1, fmt.Errorf("the device %s is in use: another sandbox, which may be ending, or this node has it mounted; "+
			"find out with `grep -l %s /proc/[0-9]*/mountinfo`", info.Device, info.Device)
	}
	if err != nil {
		return -1, fmt.Errorf("the device %s cannot be claimed: %w", info.Device, err)
	}
	return checked(fd, info)
}
