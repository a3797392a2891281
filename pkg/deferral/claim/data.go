package claim

import (
	"slices"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// reserveData reserves what is under the device, if it is a loop device, and refuses a device that
// shares its data with one of another volume. It returns the other devices with the same data.
func (o *owners) reserveData(v *volume.Volume, dev *OpenedDevice) (stack []identity, err error) {
	id := identityOf(dev.Device)
	if !id.Block {
		return nil, nil
	}
	layers := []identity{id}
	if openers.IsLoop(id) {
		if dev.loop, err = dev.openBlock(0); err != nil {
			return nil, holdError(v, err)
		}
		under, err := o.reserveBacking(v, dev.loop, id)
		if err != nil {
			return nil, err
		}
		layers = append(layers, under...)
	}
	if dev.known {
		return nil, nil
	}
	if stack, err = stackOf(o.openers, layers...); err != nil {
		return nil, unprovenError(v, err)
	}
	return stack, o.refuseStacked(v, stack)
}

// reserveBacking reserves what is under a loop device too, and returns that: two loop devices over
// one image are one disk.
func (o *owners) reserveBacking(v *volume.Volume, fd int, id identity) ([]identity, error) {
	if !openers.IsLoop(id) {
		return nil, nil
	}
	layers, err := o.openers.Layers(id, fd)
	if err != nil {
		return nil, unprovenError(v, err)
	}
	if layers = layers[1:]; len(layers) == 0 {
		return nil, volume.Errorf(volume.NotFound, "volume %s: the loop device %s has no backing file", v.Target, v.Device.Path)
	}
	for _, layer := range layers {
		if err := o.reserve(v, layer); err != nil {
			return nil, err
		}
	}
	stack, err := stackOf(o.openers, layers...)
	if err != nil {
		return nil, unprovenError(v, err)
	}
	return layers, o.refuseStacked(v, stack)
}

// refuseStacked refuses a device while another volume has one of those that share its data.
func (o *owners) refuseStacked(v *volume.Volume, stack []identity) error {
	for _, id := range stack {
		for _, other := range o.of(id) {
			if other.key != v.Key && (!other.readOnly || !v.ReadOnly) {
				return volume.Errorf(volume.InUse, "volume %s: its device %s (%s) shares data with %s, as a disk does with its partition, or a "+
					"logical volume with what it lies on; that device %w", v.Target, v.Device.Path, v.Device, id, &OwnedError{Target: other.target})
			}
		}
	}
	return nil
}

// RefuseAdopted refuses a device whose data another program has published, by whatever
// name and as whatever kind of volume. A device of such a volume that cannot be identified, because its
// filesystem hangs for example, stops no other volume.
func (u *Users) RefuseAdopted(v *volume.Volume, adopted []*volume.Volume) error {
	if len(adopted) == 0 {
		return nil
	}
	own, err := u.openers.Layers(identityOf(v.Device), sys.NoFD)
	if err != nil {
		return unprovenError(v, err)
	}
	stack, err := stackOf(u.openers, own...)
	if err != nil {
		return unprovenError(v, err)
	}
	own = append(own, stack...)
	for _, other := range adopted {
		if other.ReadOnly && v.ReadOnly {
			continue
		}
		var data []identity
		if theirs := Identify(other.Device.Path); theirs.Kind != "" {
			data, _ = u.openers.Layers(identityOf(theirs), sys.NoFD)
		}
		if other.Device.Path == v.Device.Path || slices.ContainsFunc(data, func(id identity) bool { return slices.Contains(own, id) }) {
			return volume.Errorf(volume.InUse, "volume %s: its device %s (%s) is published for %s by another program: "+
				"remove that volume with the program that made it", v.Target, v.Device.Path, v.Device, other.Target)
		}
	}
	return nil
}
