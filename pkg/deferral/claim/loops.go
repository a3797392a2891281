package claim

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// loopMajor is LOOP_MAJOR of the kernel's <linux/major.h>.
const loopMajor = 7

// reserveData reserves what is under the device, if it is a loop device, and refuses a device
// whose data somebody else uses by another name. The device is held if another volume has
// claimed it already. It returns the foreign loop devices over the same data: they are neither
// mounted nor claimed, but a process may have them open.
func (o *owners) reserveData(v *volume.Volume, dev *OpenedDevice, held bool) (foreign []loopDevice, err error) {
	if dev.Kind != volume.BlockDevice {
		return nil, nil
	}
	if dev.Major == loopMajor {
		fd, err := dev.openBlock(0)
		if err != nil {
			return nil, holdError(v, err)
		}
		defer sys.CloseFD(fd)
		if err := o.reserveBacking(v, fd, dev.Major); err != nil {
			return nil, err
		}
	}
	if dev.known {
		return nil, nil
	}
	if err := o.refuseStacked(v, dev.Device); err != nil || held {
		return nil, err
	}
	if err := o.refuseMountedBelow(v); err != nil {
		return nil, err
	}
	return o.foreignLoops(v)
}

// reserveBacking reserves what is under a loop device too: two loop devices over one image
// are one disk.
func (o *owners) reserveBacking(v *volume.Volume, fd int, major uint32) error {
	if major != loopMajor {
		return nil
	}
	info, err := unix.IoctlLoopGetStatus64(fd)
	if err != nil {
		return volume.Errorf(volume.NotFound, "volume %s: the loop device %s has no backing file: %w", v.Target, v.Device.Path, err)
	}
	layers, err := layersOf(backingOf(info))
	if err != nil {
		return unprovenError(v, err)
	}
	for _, layer := range layers {
		if err := o.reserve(v, identityOf(layer)); err != nil {
			return err
		}
	}
	return o.refuseStacked(v, layers[0])
}

// backingOf returns the image, or the block device, that is under a loop device.
func backingOf(info *unix.LoopInfo64) volume.Device {
	if info.Rdevice == 0 {
		return imageFile(info.Device, info.Inode)
	}
	under := blockDevice(info.Rdevice)
	under.Path = kernelName(under)
	return under
}

// refuseStacked refuses a device while another volume has one that shares its data.
func (o *owners) refuseStacked(v *volume.Volume, d volume.Device) error {
	stack, err := stackOf(d)
	if err != nil {
		return unprovenError(v, err)
	}
	for _, id := range stack {
		for _, other := range o.of(id) {
			if other.key != v.Key && (!other.readOnly || !v.ReadOnly) {
				return volume.Errorf(volume.InUse, "volume %s: its device %s (%s) shares data with %s of volume %s, as a disk does with its "+
					"partition, or a logical volume with what it lies on: "+volume.TextWait,
					v.Target, v.Device.Path, v.Device, describe(id), other.target)
			}
		}
	}
	return nil
}

// refuseMountedBelow refuses a loop device while the kernel has a block device under it in
// use: the loop device does not keep that one from being mounted.
func (o *owners) refuseMountedBelow(v *volume.Volume) error {
	layers, err := layersOf(v.Device)
	if err != nil {
		return unprovenError(v, err)
	}
	for _, layer := range layers[1:] {
		if layer.Kind != volume.BlockDevice || len(o.of(identityOf(layer))) > 1 { // our own claims are read-only then
			continue
		}
		if v.ReadOnly && isReadOnly(layer) {
			continue
		}
		if err := refuseInUse(v, layer); err != nil {
			return err
		}
	}
	return nil
}

// isReadOnly reports whether the kernel refuses every write to a block device.
func isReadOnly(d volume.Device) bool {
	flag, err := sys.ReadLine("/sys/dev/block/" + DeviceNumber(d.Major, d.Minor) + "/ro")
	return err == nil && flag == "1"
}

// foreignLoops lists the loop devices of other programs over the data of the volume's
// device, which sysfs does not show, and refuses the volume if the kernel has one of them in
// use. Loop devices of our own volumes are found by the owners of what is under them.
func (o *owners) foreignLoops(v *volume.Volume) (foreign []loopDevice, err error) {
	stack, err := stackOf(v.Device)
	if err != nil {
		return nil, unprovenError(v, err)
	}
	data := slices.Concat(o.owned(v.Key), stack)
	others, err := loopsOver(data, func(id identity) bool {
		return len(o.of(id)) > 0 // v among them
	})
	if err != nil {
		return nil, volume.Errorf(volume.Internal, "volume %s: loop devices cannot be listed: %w", v.Target, err)
	}
	for _, other := range others {
		if v.ReadOnly && other.readOnly {
			continue
		}
		if err := refuseInUse(v, other.Device); err != nil {
			return nil, err
		}
		if err := o.refuseStacked(v, other.Device); err != nil { // a volume may have its partition
			return nil, err
		}
		foreign = append(foreign, other)
	}
	return foreign, nil
}

// refuseInUse fails while the kernel has another device with the volume's data in use.
func refuseInUse(v *volume.Volume, other volume.Device) error {
	fd, err := unix.Open(other.Path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_EXCL, 0)
	sys.CloseFD(fd)
	switch {
	case err == nil, isNoDevice(err):
		return nil
	case errors.Is(err, unix.EBUSY):
		return volume.Errorf(volume.InUse, "volume %s: what its device %s holds is in use by %s too, which is mounted or claimed: "+
			"unmount and detach that device", v.Target, v.Device.Path, other.Path)
	default:
		return unprovenError(v, err)
	}
}

// isNoDevice reports whether an open failed because there is no such file or no device behind it.
func isNoDevice(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOMEDIUM)
}

type loopDevice struct {
	volume.Device
	readOnly bool
	under    identity
}

// loopsOver lists the loop devices over an image or device, directly or over one another,
// without those to skip. One that has no backing, or no bytes, is not in the kernel's list of
// disks. One that cannot be read is an error: it may be over the data too.
func loopsOver(data []identity, skip func(identity) bool) (out []loopDevice, err error) {
	all, err := loopDevices(skip)
	if err != nil {
		return nil, err
	}
	data = slices.Clone(data)
	for more := true; more; {
		more = false
		for _, loop := range all {
			if id := identityOf(loop.Device); slices.Contains(data, loop.under) && !slices.Contains(data, id) {
				out, data, more = append(out, loop), append(data, id), true
			}
		}
	}
	return out, nil
}

func loopDevices(skip func(identity) bool) (all []loopDevice, err error) {
	disks, err := os.ReadFile("/proc/partitions")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(disks)) {
		of := strings.Fields(line) // major, minor, size and name
		if len(of) != 4 || !isLoop(of[3]) {
			continue
		}
		own, ok := parseNumber(of[0]+":"+of[1], ":")
		own.Path = "/dev/" + of[3]
		if !ok || skip(identityOf(own)) {
			continue
		}
		info, err := loopInfo(own)
		if err != nil {
			return nil, err
		}
		if info != nil {
			all = append(all, loopDevice{
				Device: own, readOnly: info.Flags&unix.LO_FLAGS_READ_ONLY != 0, under: identityOf(backingOf(info)),
			})
		}
	}
	return all, nil
}

// isLoop reports whether a name is that of a loop device, not of its partition.
func isLoop(name string) bool {
	number, ok := strings.CutPrefix(name, "loop")
	_, err := strconv.ParseUint(number, 10, 32)
	return ok && err == nil
}

// loopInfo returns nil for a device that is no loop device, has no backing, or has gone.
func loopInfo(d volume.Device) (*unix.LoopInfo64, error) {
	if d.Kind != volume.BlockDevice || d.Major != loopMajor {
		return nil, nil //nolint:nilnil // no loop device
	}
	if d.Path == "" {
		return nil, fmt.Errorf("loop device %d has no node below /dev", d.Minor)
	}
	info, err := readLoop(d)
	if err != nil && !isNoDevice(err) {
		return nil, fmt.Errorf("the image of loop device %d cannot be read: %w", d.Minor, err)
	}
	return info, nil
}

func readLoop(d volume.Device) (*unix.LoopInfo64, error) {
	fd, err := unix.Open(d.Path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer sys.CloseFD(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || !deviceOf(&st).Same(d) {
		return nil, cmp.Or[error](err, unix.ENODEV)
	}
	return unix.IoctlLoopGetStatus64(fd)
}

// checkImage refuses an image that cannot be guarded on the host.
func checkImage(v *volume.Volume, dev *OpenedDevice) error {
	if v.ReadOnly {
		return volume.Errorf(volume.Unsupported, "volume %s: read-only cannot be enforced for the image file %s: "+
			"attach it with `losetup --read-only` and hand over the loop device", v.Target, v.Device.Path)
	}
	loops, err := loopsOver([]identity{identityOf(dev.Device)}, func(identity) bool { return false })
	if err != nil {
		return volume.Errorf(volume.Internal, "volume %s: loop devices cannot be listed: %w", v.Target, err)
	}
	if len(loops) > 0 {
		return volume.Errorf(volume.InUse, "volume %s: the image %s is attached to %s: hand over that device, or detach it",
			v.Target, v.Device.Path, loops[0].Path)
	}
	return nil
}

// RefuseAdopted refuses a device whose data another program has published, by whatever
// name and as whatever kind of volume.
func RefuseAdopted(v *volume.Volume, adopted []*volume.Volume) error {
	if len(adopted) == 0 {
		return nil
	}
	own, err := dataOf(v.Device)
	if err != nil {
		return unprovenError(v, err)
	}
	stack, err := stackOf(v.Device)
	if err != nil {
		return unprovenError(v, err)
	}
	own = append(own, stack...)
	for _, other := range adopted {
		theirs := Identify(other.Device.Path)
		if theirs.Kind == "" || other.ReadOnly && v.ReadOnly {
			continue
		}
		data, err := dataOf(theirs)
		if err != nil {
			return unprovenError(v, err)
		}
		if slices.ContainsFunc(data, func(id identity) bool { return slices.Contains(own, id) }) {
			return volume.Errorf(volume.InUse, "volume %s: its device %s (%s) is published for %s by another program: "+
				"remove that volume with the program that made it", v.Target, v.Device.Path, v.Device, other.Target)
		}
	}
	return nil
}

// layersOf returns the device and, if it is a loop device, what is under it: other loop
// devices, and at last an image or another block device. All of them are one disk.
func layersOf(d volume.Device) ([]volume.Device, error) {
	layers := []volume.Device{d}
	for len(layers) < maxStack {
		info, err := loopInfo(d)
		if err != nil || info == nil {
			return layers, err
		}
		d = backingOf(info)
		layers = append(layers, d)
	}
	return layers, fmt.Errorf("%d loop devices lie over one another", maxStack)
}

// dataOf returns the identities of a device's layers: a process can reach the data through
// each. With an error, some are missing.
func dataOf(d volume.Device) ([]identity, error) {
	layers, err := layersOf(d)
	out := make([]identity, 0, len(layers))
	for _, layer := range layers {
		out = append(out, identityOf(layer))
	}
	return out, err
}
