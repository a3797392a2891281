package claim

import (
	"errors"
	"slices"
	"sync"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
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
}

func newOwners(finder Openers) *owners {
	return &owners{openers: finder, byID: make(map[identity][]owner), byKey: make(map[volume.Key][]identity)}
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
}

// of returns the owners of a device, those of loop devices over it among them.
func (o *owners) of(id identity) []owner {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.byID[id])
}

// ofDevice returns the owners whose own device it is: the kernel's claim is held for them.
func (o *owners) ofDevice(id identity) []owner {
	return slices.DeleteFunc(o.of(id), func(of owner) bool { return of.below })
}

func (o *owners) owned(key volume.Key) []identity {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.byKey[key])
}

// beside returns the devices of other volumes that lie directly on the volume's device, or on what
// that lies on: all of them are read-only.
func (o *owners) beside(key volume.Key) (out []identity) {
	o.mu.Lock()
	defer o.mu.Unlock()
	mine := o.byKey[key]
	for _, id := range mine {
		for _, other := range o.byID[id] {
			theirs := o.byKey[other.key]
			at := slices.Index(theirs, id)
			if at > 0 && !slices.Contains(mine, theirs[at-1]) && !slices.Contains(out, theirs[at-1]) {
				out = append(out, theirs[at-1])
			}
		}
	}
	return out
}
