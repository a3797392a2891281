package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/reference/mountwatch"
)

const mib = 1 << 20

// The sizes of the new filesystem, of the device, and of the grown device. mkfs.xfs
// refuses less than 300 MiB.
const (
	madeSize  = 320 * mib
	diskSize  = 448 * mib
	grownSize = 576 * mib
)

// disk is a loop device with a filesystem.
type disk struct {
	image, path  string
	major, minor uint32
}

// newDisk makes a disk whose filesystem is smaller than the device.
func newDisk(t *trial, n *node) *disk {
	n.count++
	d := &disk{image: n.path("disk-" + strconv.Itoa(n.count))}
	t.must(os.WriteFile(d.image, nil, 0o600))
	n.scratch.add(func(context.Context) error { return os.Remove(d.image) })
	t.must(os.Truncate(d.image, diskSize))
	// It is detached when this program ends, even by a kill.
	hold, err := loopdev.AttachHeld(d.image, loopdev.Options{})
	t.must(err)
	d.path = hold.Name()
	n.scratch.add(func(ctx context.Context) error { return d.release(ctx, n.mounts, hold) })
	var st unix.Stat_t
	t.must(unix.Fstat(int(hold.Fd()), &st))
	d.major, d.minor = unix.Major(st.Rdev), unix.Minor(st.Rdev)
	n.mounts.Add(d.names()...)
	t.must(d.makeFilesystem(t.ctx, n.opts.FSType))
	return d
}

func (d *disk) names() []string { return []string{d.path, fmt.Sprintf("%d:%d", d.major, d.minor)} }

func (d *disk) makeFilesystem(ctx context.Context, fsType string) error {
	args := mkfsArguments(d.path, madeSize)[fsType]
	cmd := exec.CommandContext(ctx, "mkfs."+fsType, args...) //nolint:gosec // one of three
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", cmd, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// mkfsArguments are those of each filesystem's mkfs, for one of a size on a device.
func mkfsArguments(device string, size int) map[string][]string {
	return map[string][]string{
		"ext4":  {"-q", "-F", device, strconv.Itoa(size/1024) + "k"},
		"xfs":   {"-q", "-f", "-d", "size=" + strconv.Itoa(size), device},
		"btrfs": {"-q", "-f", "-b", strconv.Itoa(size), device},
	}
}

// release closes the device and waits until it is detached.
func (d *disk) release(ctx context.Context, mounts *mountwatch.Watch, hold *os.File) error {
	err := errors.Join(d.setReadOnly(false), hold.Close())
	if err != nil {
		return err
	}
	err = eventually(ctx, endsWithin, func(context.Context) error {
		left, err := loopdev.Over(d.image)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("the loop device %s is still in use: a sandbox or the handler has it", d.path)
		}
		return err
	})
	mounts.Remove(d.names()...)
	return err
}

// grow makes the device larger, as a CSI driver does.
func (d *disk) grow() error {
	if err := os.Truncate(d.image, grownSize); err != nil {
		return err
	}
	return loopdev.Grow(d.path)
}

// setReadOnly sets the device's read-only flag, as the broker does for a read-only
// volume. The kernel keeps the flag for the next user of the loop device.
func (d *disk) setReadOnly(is bool) error {
	fd, err := os.Open(d.path)
	if err != nil {
		return err
	}
	defer func() { _ = fd.Close() }()
	value := 0
	if is {
		value = 1
	}
	return unix.IoctlSetPointerInt(int(fd.Fd()), unix.BLKROSET, value)
}

// free fails while the device is mounted or claimed in any mount namespace.
func (d *disk) free() error {
	fd, err := unix.Open(d.path, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("the device %s is still mounted somewhere", d.path)
	}
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func (d *disk) waitFree(ctx context.Context) error {
	return eventually(ctx, endsWithin, func(context.Context) error { return d.free() })
}
