package claim

import (
	"context"
	"errors"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// identity is what a device is: its number or, for an image, its filesystem and inode.
type identity = openers.File

func identityOf(d volume.Device) identity {
	return identity{Block: d.Kind == volume.BlockDevice, Major: d.Major, Minor: d.Minor, Inode: d.Inode}
}

// owners is the table of who owns which data. A volume owns its device and, if that is
// a loop device, also what lies under it.
type owners struct {
	openers Openers
	mu      sync.Mutex
	byID    map[identity][]owner
	byKey   map[volume.Key][]identity
	// expected are the volumes on record whose devices are not claimed again yet, as at a start: they own the
	// device, and what is under it is not known.
	expected map[volume.Key]*volume.Volume
}

func newOwners(finder Openers) *owners {
	return &owners{
		openers: finder, byID: make(map[identity][]owner), byKey: make(map[volume.Key][]identity), expected: make(map[volume.Key]*volume.Volume),
	}
}

type owner struct {
	key      volume.Key
	target   string
	readOnly bool
	below    bool // it has a loop device over this one
}

// OwnedError is part of the refusal of a device that another volume has.
type OwnedError struct {
	Target string // of the other volume
}

func (e *OwnedError) Error() string { return "belongs to volume " + e.Target }

// ErrLost is part of each error for a volume without a usable record, and for a device that such a volume may have.
var ErrLost = errors.New("a volume whose record cannot be used")

// reserve makes the volume an owner, unless another volume excludes it.
func (o *owners) reserve(v *volume.Volume, id identity) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, other := range o.byID[id] {
		if other.key == v.Key {
			return nil
		}
		if !other.readOnly || !v.ReadOnly {
			return volume.Errorf(volume.InUse, "volume %s: its device %s (%s) %w: a device can have one read-write "+
				"sandbox, or several that are all read-only",
				v.Target, v.Device.Path, v.Device, &OwnedError{Target: other.target})
		}
	}
	o.byID[id] = append(o.byID[id], owner{key: v.Key, target: v.Target, readOnly: v.ReadOnly, below: id != identityOf(v.Device)})
	o.byKey[v.Key] = append(o.byKey[v.Key], id)
	return nil
}

// remove removes a volume from all that it owns.
func (o *owners) remove(key volume.Key) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, id := range o.byKey[key] {
		o.byID[id] = slices.DeleteFunc(o.byID[id], func(other owner) bool { return other.key == key })
		if len(o.byID[id]) == 0 {
			delete(o.byID, id)
		}
	}
	delete(o.byKey, key)
	delete(o.expected, key)
}

func (o *owners) expect(v *volume.Volume) {
	if o.reserve(v, identityOf(v.Device)) == nil {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.expected[v.Key] = v
	}
}

// confirm ends the expectation: the device is claimed, or it has gone and the volume owns nothing.
func (o *owners) confirm(key volume.Key, claimed bool) {
	o.mu.Lock()
	_, was := o.expected[key]
	delete(o.expected, key)
	o.mu.Unlock()
	if was && !claimed {
		o.remove(key)
	}
}

// refuseExpected refuses a device that another volume is expected to have, by its number or its name: whether it has it,
// and who uses it, may never be known, because the device hangs.
func (o *owners) refuseExpected(v *volume.Volume) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, other := range o.expected {
		if other.Key != v.Key && (identityOf(other.Device) == identityOf(v.Device) || other.Device.Path == v.Device.Path) {
			return volume.Errorf(volume.InUse, "volume %s: its device %s (%s) %w, for which it could not be claimed again yet",
				v.Target, v.Device.Path, v.Device, &OwnedError{Target: other.Target})
		}
	}
	return nil
}

// expectedLoops are the loop devices that other volumes had, and have not claimed again yet: nobody may have one open.
func (o *owners) expectedLoops(v *volume.Volume) (loops []identity) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, other := range o.expected {
		if id := identityOf(other.Device); other.Key != v.Key && (!other.ReadOnly || !v.ReadOnly) && openers.IsLoop(id) {
			loops = append(loops, id)
		}
	}
	return loops
}

// has reports whether the volume has the device, and all that it was to claim of it.
func (o *owners) has(key volume.Key, id identity) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.expected[key] == nil && slices.Contains(o.byKey[key], id)
}

// ofDevice returns the owners whose own device it is: the kernel's claim is held for them.
func (o *owners) ofDevice(id identity) []owner {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(o.byID[id]), func(of owner) bool { return of.below })
}

func (o *owners) owned(key volume.Key) []identity {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.byKey[key])
}

// beside returns the devices of other volumes that lie directly on the volume's device, or on what
// that lies on: all of them are read-only. The count of a partition has nothing of what its disk lies on.
func (o *owners) beside(key volume.Key) (out []identity) {
	o.mu.Lock()
	defer o.mu.Unlock()
	mine := o.byKey[key]
	for i, id := range mine {
		if i > 0 && !openers.IsLoop(mine[i-1]) {
			break
		}
		for _, other := range o.byID[id] {
			theirs := o.byKey[other.key]
			at := slices.Index(theirs, id)
			if at > 0 && openers.IsLoop(theirs[at-1]) && !slices.Contains(mine, theirs[at-1]) && !slices.Contains(out, theirs[at-1]) {
				out = append(out, theirs[at-1])
			}
		}
	}
	return out
}

// reserveData reserves what is under the device, and refuses a device that shares its data with one of
// another volume. It returns the other devices with the same data.
func (o *owners) reserveData(v *volume.Volume, dev *OpenedDevice) (stack []identity, err error) {
	id := identityOf(dev.Device)
	if !id.Block {
		return nil, nil
	}
	if openers.IsLoop(id) {
		if dev.loop, err = dev.openBlock(0); err != nil {
			return nil, holdError(v, err)
		}
	}
	layers, err := o.reserveBacking(v, dev.loop, id)
	if err != nil || dev.known {
		return nil, err
	}
	if stack, err = stackOf(blockDevices, o.openers, append(layers, id)...); err != nil {
		return nil, unprovenError(v, err)
	}
	return stack, o.refuseStacked(v, stack)
}

// reserveBacking reserves what is under a loop device too, and returns that: two loop devices over
// one image are one disk. The kernel does not count who reads an image, so a reader also reserves those of its stack.
func (o *owners) reserveBacking(v *volume.Volume, fd int, id identity) (layers []identity, err error) {
	over := []identity{id}
	if openers.IsLoop(id) {
		if layers, err = o.openers.Layers(id, fd); err != nil {
			return nil, unprovenError(v, err)
		}
		if layers = layers[1:]; len(layers) == 0 {
			return nil, volume.Errorf(volume.NotFound, "volume %s: the loop device %s has no backing file", v.Target, v.Device.Path)
		}
		over = layers
	} else if !v.ReadOnly {
		return nil, nil
	}
	for _, layer := range layers {
		if err := o.reserve(v, layer); err != nil {
			return nil, err
		}
	}
	stack, err := stackOf(blockDevices, o.openers, over...)
	if err != nil {
		return nil, unprovenError(v, err)
	}
	for i, device := range stack {
		// What a writable loop device lies on is counted, and its other partitions may have writers.
		if v.ReadOnly && !device.Block && i > 0 && isReadOnly(stack[i-1]) {
			if err := o.reserve(v, device); err != nil {
				return nil, err
			}
		}
	}
	return layers, o.refuseStacked(v, stack)
}

// refuseStacked refuses a device while another volume has one of those that share its data.
func (o *owners) refuseStacked(v *volume.Volume, stack []identity) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, id := range stack {
		for _, other := range o.byID[id] {
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
// filesystem hangs for example, counts as what it was when the volume was found, and stops no other one.
func (u *Users) RefuseAdopted(ctx context.Context, v *volume.Volume, adopted []*volume.Volume) error {
	if len(adopted) == 0 {
		return nil
	}
	own, err := u.openers.Layers(identityOf(v.Device), sys.NoFD)
	stack, stackErr := stackOf(blockDevices, u.openers, own...)
	if err = errors.Join(err, stackErr); err != nil {
		return unprovenError(v, err)
	}
	own = append(own, stack...)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(16) // of those that hang, 64 are waited for in all
	for _, other := range adopted {
		if other.ReadOnly && v.ReadOnly {
			continue
		}
		group.Go(func() error {
			if err := ctx.Err(); err != nil {
				return volume.Errorf(volume.ContextKind(err), "volume %s: it could not be compared with all volumes of other programs: %w", v.Target, err)
			}
			theirs, err := identify(other.Device.Path)
			if err != nil && !openers.IsNoDevice(err) {
				theirs = other.Device
			}
			data, _ := u.openers.Layers(identityOf(theirs), sys.NoFD)
			if other.Device.Path == v.Device.Path || slices.ContainsFunc(data, func(id identity) bool { return slices.Contains(own, id) }) {
				return volume.Errorf(volume.InUse, "volume %s: its device %s (%s) is published for %s by another program: "+
					"remove that volume with the program that made it", v.Target, v.Device.Path, v.Device, other.Target)
			}
			return nil
		})
	}
	return group.Wait()
}
