package deferral

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// FDKeeper keeps descriptors over a restart of the daemon, as systemd's
// file-descriptor store does. Remove returns only when the keeper has closed
// its copy: until then the device stays claimed.
type FDKeeper interface {
	StoreFD(name string, file *os.File) error
	RemoveFD(name string) error
}

// claims is who owns which device. The owner is told by what a device is, so
// that neither a second name nor a second loop device over one image leads to a
// second read-write owner; and by an fd opened O_EXCL, so that the kernel refuses
// every mount of the device, in every mount namespace, while we hold it. Where
// this node's kernel is to mount it for a sandbox, the fd is a plain one, and that
// mount is what keeps others out.
type claims struct {
	keeper  FDKeeper
	devices keyLocks // one claim or release a device at a time

	mu     sync.Mutex
	owners map[identity][]owner
	held   map[identity]*heldDevice
	byKey  map[Key][]identity
}

// identity is what a device is: "b7:3" or, for a file, "f8:1:42".
type identity string

type owner struct {
	key      Key
	target   string
	readOnly bool
}

func newClaims(keeper FDKeeper) *claims {
	return &claims{
		keeper: keeper,
		owners: make(map[identity][]owner), held: make(map[identity]*heldDevice), byKey: make(map[Key][]identity),
	}
}

func (d Device) identity() identity {
	if d.Kind == ImageFile {
		return identity(fmt.Sprintf("f%d:%d:%d", d.Major, d.Minor, d.Inode))
	}
	return blockIdentity(d.Major, d.Minor)
}

func blockIdentity(major, minor uint32) identity {
	return identity("b" + strconv.FormatUint(uint64(major), 10) + ":" + strconv.FormatUint(uint64(minor), 10))
}

func claimName(id identity) string {
	return "claim-" + strings.ReplaceAll(string(id), ":", "-")
}

// acquire claims the device for the volume, or says who has it. It tells the
// state that the device's read-only flag had of itself. What prepare does, if it
// is not nil, is done while nobody else can claim the device from us, for its
// first owner only: a second one finds it prepared.
func (c *claims) acquire(
	ctx context.Context, rec *record, dev *openedDevice, prepare func(context.Context) error,
) (wasReadOnly bool, err error) {
	id, v := dev.identity(), &rec.Volume
	unlock, err := c.devices.lock(ctx, Key(id))
	if err != nil {
		return false, err
	}
	defer unlock()
	if err := c.reserve(v, id); err != nil {
		return false, err
	}
	if prepare != nil && !c.isHeld(id) {
		err = prepare(ctx)
	}
	switch {
	case err != nil:
	case dev.Kind == BlockDevice:
		wasReadOnly, err = c.hold(ctx, rec, dev, id)
	case !dev.known:
		err = checkImage(v, dev)
	}
	if err != nil {
		return false, errors.Join(err, c.drop(v.Key, id))
	}
	return wasReadOnly, nil
}

func (c *claims) isHeld(id identity) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.held[id] != nil
}

// reserve enters the owner in the table, or refuses.
func (c *claims) reserve(v *Volume, id identity) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range c.owners[id] {
		if o.key == v.Key {
			return nil
		}
		if !o.readOnly || !v.ReadOnly {
			return secondOwner(v, o)
		}
	}
	c.owners[id] = append(c.owners[id], owner{key: v.Key, target: v.Target, readOnly: v.ReadOnly})
	c.byKey[v.Key] = append(c.byKey[v.Key], id)
	return nil
}

func secondOwner(v *Volume, o owner) error {
	return Errorf(InUse, "volume %s: its device %s (%s) belongs to volume %s: a device can have one read-write "+
		"sandbox, or several that are all read-only; wait until the other pod is gone",
		v.Target, v.Device.Path, v.Device, o.target)
}

// release gives the volume's claims up.
func (c *claims) release(key Key) error {
	c.mu.Lock()
	ids := slices.Clone(c.byKey[key])
	c.mu.Unlock()
	if len(ids) == 0 {
		return nil
	}
	// A release cannot give up: it waits for the device's turn.
	unlock, err := c.devices.lock(context.Background(), Key(ids[0]))
	if err != nil {
		return err
	}
	defer unlock()
	return c.drop(key, ids[0])
}

// drop takes the owner out of the table and, with the last one, lets the kernel's
// claim go. The caller has the device's turn.
func (c *claims) drop(key Key, primary identity) error {
	c.mu.Lock()
	for _, id := range c.byKey[key] {
		c.owners[id] = slices.DeleteFunc(c.owners[id], func(o owner) bool { return o.key == key })
		if len(c.owners[id]) == 0 {
			delete(c.owners, id)
		}
	}
	delete(c.byKey, key)
	last := len(c.owners[primary]) == 0
	c.mu.Unlock()
	if !last {
		return nil
	}
	return c.releaseBlock(primary)
}
