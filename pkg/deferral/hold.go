package deferral

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// heldDevice is a block device held open, for one or more read-only owners or a
// single one.
type heldDevice struct {
	fd     int
	device Device
	// mountable is set where fd is a plain one, so that this node's kernel can
	// mount the device for a sandbox; else it is opened O_EXCL.
	mountable bool
	// wasReadOnly is the device's own state before the first owner came.
	wasReadOnly bool
}

// hold takes the kernel's claim and what can only be asked of the open device.
func (c *claims) hold(ctx context.Context, rec *record, dev *openedDevice, id identity) (wasReadOnly bool, err error) {
	c.mu.Lock()
	held := c.held[id]
	c.mu.Unlock()
	if held != nil && held.mountable != rec.HostMounts {
		return false, otherKind(&rec.Volume)
	}
	if held == nil {
		if held, err = openHeld(ctx, rec, dev); err != nil {
			return false, err
		}
		if err := c.keep(id, held); err != nil {
			closeFD(held.fd)
			return false, err
		}
	}
	return held.wasReadOnly, c.holdBacking(&rec.Volume, held.fd, dev.Major)
}

// otherKind refuses read-only volumes of one device by two kinds of handler: what
// one needs the kernel to refuse, the other needs it to do.
func otherKind(v *Volume) error {
	return Errorf(InUse, "volume %s: its device %s (%s) belongs to a volume of another runtime handler, and only one of "+
		"the two has this node's kernel mount it: use one handler for both, or wait until the other pod is gone",
		v.Target, v.Device.Path, v.Device)
}

// keep enters the held device. A plain descriptor keeps nobody out and is opened
// anew after a restart, so that the keeper has no copy of it for a driver's
// detach to wait for.
func (c *claims) keep(id identity, held *heldDevice) error {
	if c.keeper != nil && !held.mountable {
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

func openHeld(ctx context.Context, rec *record, dev *openedDevice) (*heldDevice, error) {
	fd, err := openClaim(ctx, rec, dev)
	if err != nil {
		return nil, holdError(&rec.Volume, err)
	}
	wasReadOnly, err := checkHeld(&rec.Volume, fd)
	if err != nil {
		closeFD(fd)
		return nil, err
	}
	return &heldDevice{fd: fd, device: dev.Device, mountable: rec.HostMounts, wasReadOnly: wasReadOnly}, nil
}

// openClaim opens the device so that nobody else has it. Where a sandbox's mount
// is to be the claim, that holds for the moment of the first stage; later it may
// well be mounted, and by its own sandbox.
func openClaim(ctx context.Context, rec *record, dev *openedDevice) (int, error) {
	if rec.HostMounts && dev.known {
		return dev.openBlock(0)
	}
	fd, err := openAlone(ctx, dev)
	if err != nil || !rec.HostMounts {
		return fd, err
	}
	defer closeFD(fd)
	return dev.openBlock(0)
}

// momentTime bounds the wait for who has a device only for a moment: a program that
// looks at it, or one that is just being started and has copies of our descriptors. A
// caller that is refused comes again half a second later at best.
const momentTime = 500 * time.Millisecond

// openAlone opens the device exclusively.
func openAlone(ctx context.Context, dev *openedDevice) (int, error) {
	for deadline := time.Now().Add(momentTime); ; {
		fd, err := dev.openBlock(unix.O_EXCL)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return fd, err
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return fd, err
		}
	}
}

func checkHeld(v *Volume, fd int) (readOnly bool, err error) {
	size, err := unix.Seek(fd, 0, unix.SEEK_END)
	if err != nil {
		return false, err
	}
	if size == 0 {
		return false, Errorf(NotFound, "volume %s: the device %s (%s) is empty: has the driver attached it?",
			v.Target, v.Device.Path, v.Device)
	}
	flag, err := unix.IoctlGetInt(fd, unix.BLKROGET)
	if err != nil {
		return false, err
	}
	if flag != 0 && !v.ReadOnly {
		return false, Errorf(Invalid, "volume %s: the device %s (%s) is read-only: ask for a read-only volume",
			v.Target, v.Device.Path, v.Device)
	}
	return flag != 0, nil
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

func (c *claims) releaseBlock(id identity) error {
	c.mu.Lock()
	held := c.held[id]
	delete(c.held, id)
	c.mu.Unlock()
	if held == nil {
		return nil
	}
	closeFD(held.fd)
	if c.keeper == nil || held.mountable {
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
