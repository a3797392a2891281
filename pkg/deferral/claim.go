package deferral

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
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
// every mount of the device, in every mount namespace, while we hold it.
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

// heldDevice is a block device held by O_EXCL, for one or more read-only owners
// or a single one.
type heldDevice struct {
	fd     int
	device Device
	// wasReadOnly is the device's own state before the first owner came.
	wasReadOnly bool
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
// state that the device's read-only flag had of itself.
func (c *claims) acquire(ctx context.Context, v *Volume, dev *openedDevice) (wasReadOnly bool, err error) {
	id := dev.identity()
	unlock, err := c.devices.lock(ctx, Key(id))
	if err != nil {
		return false, err
	}
	defer unlock()
	if err := c.reserve(v, id); err != nil {
		return false, err
	}
	if dev.Kind == ImageFile {
		err = checkImage(v, dev)
	} else {
		wasReadOnly, err = c.hold(v, dev, id)
	}
	if err != nil {
		return false, errors.Join(err, c.drop(v.Key, id))
	}
	return wasReadOnly, nil
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

// hold takes the kernel's claim and what can only be asked of the open device.
func (c *claims) hold(v *Volume, dev *openedDevice, id identity) (wasReadOnly bool, err error) {
	c.mu.Lock()
	held := c.held[id]
	c.mu.Unlock()
	if held == nil {
		if held, err = openHeld(v, dev); err != nil {
			return false, err
		}
		if err := c.keep(id, held); err != nil {
			closeFD(held.fd)
			return false, err
		}
	}
	return held.wasReadOnly, c.holdBacking(v, held.fd, dev.Major)
}

func (c *claims) keep(id identity, held *heldDevice) error {
	if c.keeper != nil {
		file, err := dupFile(held.fd, claimName(id))
		if err != nil {
			return Errorf(Internal, "device %s: the claim cannot be kept: %w", id, err)
		}
		err = c.keeper.StoreFD(claimName(id), file)
		_ = file.Close()
		if err != nil {
			return Errorf(Internal, "device %s: the claim cannot be kept over a restart: %w", id, err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held[id] = held
	return nil
}

func dupFile(fd int, name string) (*os.File, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(dup), name), nil
}

func openHeld(v *Volume, dev *openedDevice) (*heldDevice, error) {
	fd, err := dev.openBlock(unix.O_EXCL)
	if err != nil {
		return nil, holdError(v, err)
	}
	size, err := unix.Seek(fd, 0, unix.SEEK_END)
	if err == nil && size == 0 {
		err = Errorf(NotFound, "volume %s: the device %s (%s) is empty: has the driver attached it?",
			v.Target, v.Device.Path, v.Device)
	}
	readOnly := 0
	if err == nil {
		readOnly, err = unix.IoctlGetInt(fd, unix.BLKROGET)
	}
	if err == nil && readOnly != 0 && !v.ReadOnly {
		err = Errorf(Invalid, "volume %s: the device %s (%s) is read-only: ask for a read-only volume",
			v.Target, v.Device.Path, v.Device)
	}
	if err != nil {
		closeFD(fd)
		return nil, err
	}
	return &heldDevice{fd: fd, device: dev.Device, wasReadOnly: readOnly != 0}, nil
}

func holdError(v *Volume, err error) error {
	switch {
	case errors.Is(err, unix.EBUSY):
		return Errorf(InUse, "volume %s: the device %s (%s) is in use by this node's kernel: %s",
			v.Target, v.Device.Path, v.Device, whoHolds(v.Device))
	case errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENOMEDIUM):
		return Errorf(NotFound, "volume %s: there is nothing behind the device %s (%s): has the driver attached it? %w",
			v.Target, v.Device.Path, v.Device, err)
	default:
		return Errorf(Internal, "volume %s: the device %s (%s) cannot be claimed: %w", v.Target, v.Device.Path, v.Device, err)
	}
}

// whoHolds guesses, for a person, why an exclusive open failed.
func whoHolds(d Device) string {
	number := fmt.Sprintf("%d:%d", d.Major, d.Minor)
	if points := hostMountsOf(number); len(points) > 0 {
		return "it is mounted at " + strings.Join(points[:min(3, len(points))], ", ") + "; unmount it"
	}
	holders, err := filepath.Glob("/sys/dev/block/" + number + "/holders/*")
	if err == nil && len(holders) > 0 {
		return "it is part of " + filepath.Base(holders[0])
	}
	return "it is mounted in another mount namespace, is swap, or another program holds it exclusively"
}

// holdBacking claims what lies under a loop device too: two loop devices over
// one image are one disk.
func (c *claims) holdBacking(v *Volume, fd int, major uint32) error {
	if major != loopMajor {
		return nil
	}
	info, err := unix.IoctlLoopGetStatus64(fd)
	if err != nil {
		return Errorf(NotFound, "volume %s: the loop device %s has no backing file: %w", v.Target, v.Device.Path, err)
	}
	id := identity(fmt.Sprintf("f%d:%d:%d", unix.Major(info.Device), unix.Minor(info.Device), info.Inode))
	if info.Rdevice != 0 {
		id = blockIdentity(unix.Major(info.Rdevice), unix.Minor(info.Rdevice))
	}
	return c.reserve(v, id)
}

// loopMajor is LOOP_MAJOR of the kernel's <linux/major.h>.
const loopMajor = 7

// checkImage refuses an image that cannot be guarded on the host.
func checkImage(v *Volume, dev *openedDevice) error {
	if v.ReadOnly {
		return Errorf(Unsupported, "volume %s: read-only cannot be enforced for the image file %s: "+
			"attach it with `losetup --read-only` and hand over the loop device", v.Target, v.Device.Path)
	}
	loops, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return Errorf(Internal, "volume %s: loop devices cannot be listed: %w", v.Target, err)
	}
	for _, file := range loops {
		name := "/dev/" + filepath.Base(filepath.Dir(filepath.Dir(file)))
		if loopOver(name, dev.Device) {
			return Errorf(InUse, "volume %s: the image %s is attached to %s: hand over that device, or detach it",
				v.Target, v.Device.Path, name)
		}
	}
	return nil
}

func loopOver(name string, image Device) bool {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer closeFD(fd)
	info, err := unix.IoctlLoopGetStatus64(fd)
	return err == nil && info.Device == unix.Mkdev(image.Major, image.Minor) && info.Inode == image.Inode
}

// setReadOnly makes the kernel refuse every write to the device, by whomever.
func (c *claims) setReadOnly(v *Volume) error {
	if v.Device.Kind != BlockDevice || !v.ReadOnly {
		return nil
	}
	c.mu.Lock()
	held := c.held[v.Device.identity()]
	c.mu.Unlock()
	if held == nil {
		return Errorf(Internal, "volume %s: the device %s is not held", v.Target, v.Device.Path)
	}
	// A device that is read-only of itself is left as it is: the flag that we
	// would set outlives the attachment of, say, a loop device.
	if already, err := unix.IoctlGetInt(held.fd, unix.BLKROGET); err == nil && already != 0 {
		return nil
	}
	if err := unix.IoctlSetPointerInt(held.fd, unix.BLKROSET, 1); err != nil {
		return Errorf(Internal, "volume %s: the device %s cannot be made read-only: %w", v.Target, v.Device.Path, err)
	}
	return nil
}

// putBack restores the device's own read-only state when the volume is its last
// owner. The claim still stands meanwhile.
func (c *claims) putBack(rec *record) error {
	if rec.Device.Kind != BlockDevice || !rec.ReadOnly || rec.DeviceWasReadOnly {
		return nil
	}
	id := rec.Device.identity()
	c.mu.Lock()
	held, owners := c.held[id], c.owners[id]
	c.mu.Unlock()
	if slices.ContainsFunc(owners, func(o owner) bool { return o.key != rec.Key }) {
		return nil
	}
	if held != nil {
		return makeWritable(rec, held.fd)
	}
	fd, err := openByIdentity(rec.Device, 0)
	if err != nil {
		return nil //nolint:nilerr // a device that has gone has no state to put back
	}
	defer closeFD(fd)
	return makeWritable(rec, fd)
}

func makeWritable(rec *record, fd int) error {
	if err := unix.IoctlSetPointerInt(fd, unix.BLKROSET, 0); err != nil && !errors.Is(err, unix.ENXIO) && !errors.Is(err, unix.ENODEV) {
		return Errorf(Internal, "volume %s: the device %s cannot be made writable again: %w", rec.Target, rec.Device.Path, err)
	}
	return nil
}

// openByIdentity opens a device by its recorded name if it is still that device.
func openByIdentity(d Device, flags int) (int, error) {
	fd, err := unix.Open(d.Path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC|flags, 0)
	if err != nil {
		return noFD, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || !d.is(&st) {
		closeFD(fd)
		return noFD, errors.Join(err, fmt.Errorf("%s is not %s any more", d.Path, d))
	}
	return fd, nil
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

func (c *claims) releaseBlock(id identity) error {
	c.mu.Lock()
	held := c.held[id]
	delete(c.held, id)
	c.mu.Unlock()
	if held == nil {
		return nil
	}
	closeFD(held.fd)
	if c.keeper == nil {
		return nil
	}
	if err := c.keeper.RemoveFD(claimName(id)); err != nil {
		return Errorf(Internal, "device %s: the kept claim cannot be given up: %w", id, err)
	}
	waitFree(held.device)
	return nil
}

// freeTime bounds the wait for a keeper's copy to be closed.
const freeTime = 2 * time.Second

// waitFree waits until the device can be claimed again. The keeper has let go of
// its copy, but systemd closes such a descriptor in a thread of its own, and a
// driver that detaches the device right after us must not find it busy. Where
// it stays busy somebody else has it by now, which is no fault.
func waitFree(d Device) {
	for deadline := time.Now().Add(freeTime); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		fd, err := openByIdentity(d, unix.O_EXCL)
		if !errors.Is(err, unix.EBUSY) {
			closeFD(fd)
			return
		}
	}
}

// reclaim takes up, after a restart, the claim of a volume on record: from a
// kept descriptor where there is one, else by opening the device again.
func (c *claims) reclaim(ctx context.Context, rec *record, kept map[string]*os.File) error {
	id := rec.Device.identity()
	c.mu.Lock()
	done := slices.Contains(c.byKey[rec.Key], id)
	c.mu.Unlock()
	if done {
		return nil
	}
	if rec.Device.Kind == BlockDevice {
		if file := kept[claimName(id)]; file != nil {
			return c.adoptKept(rec, id, file)
		}
	}
	fd, err := unix.Open(rec.Device.Path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return deviceError(NotFound, rec.Target, rec.Device.Path, "has gone", err)
	}
	dev := &openedDevice{Device: rec.Device, fd: fd}
	defer dev.close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || !rec.Device.is(&st) {
		return deviceError(NotFound, rec.Target, rec.Device.Path, "is not "+rec.Device.String()+" any more", err)
	}
	_, err = c.acquire(ctx, &rec.Volume, dev)
	if err == nil {
		c.restoreOwnState(rec, id)
	}
	return err
}

// restoreOwnState puts the recorded state of the device over the one that was
// read just now, which may be the one that we had set.
func (c *claims) restoreOwnState(rec *record, id identity) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if held := c.held[id]; held != nil && rec.ReadOnly {
		held.wasReadOnly = rec.DeviceWasReadOnly
	}
}

// adoptKept takes a descriptor from the keeper as the claim.
func (c *claims) adoptKept(rec *record, id identity, file *os.File) error {
	if err := c.reserve(&rec.Volume, id); err != nil {
		return err
	}
	c.mu.Lock()
	held := c.held[id]
	c.mu.Unlock()
	if held == nil {
		fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return Errorf(Internal, "volume %s: the kept claim of %s cannot be used: %w", rec.Target, rec.Device.Path, err)
		}
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil || !rec.Device.is(&st) {
			closeFD(fd)
			return Errorf(Internal, "volume %s: the kept claim is not of %s", rec.Target, rec.Device)
		}
		held = &heldDevice{fd: fd, device: rec.Device, wasReadOnly: rec.DeviceWasReadOnly}
		c.mu.Lock()
		c.held[id] = held
		c.mu.Unlock()
	}
	return c.holdBacking(&rec.Volume, held.fd, rec.Device.Major)
}

// closeAll closes the descriptors; kept copies stay with the keeper.
func (c *claims) closeAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, held := range c.held {
		closeFD(held.fd)
		delete(c.held, id)
	}
}
