package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/loopdev"
)

const mib = 1 << 20

// The sizes: of the filesystem as it is made, of the device, and of the device
// when it has grown. xfs is not made smaller than 300 MiB.
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

// newDisk makes one whose filesystem is smaller than the device.
func (n *node) newDisk(ctx context.Context) (_ *disk, err error) {
	n.count++
	d := &disk{image: n.path("disk-" + strconv.Itoa(n.count))}
	if err := os.WriteFile(d.image, nil, 0o600); err != nil {
		return nil, err
	}
	n.later(func(context.Context) error { return os.Remove(d.image) })
	if err := os.Truncate(d.image, diskSize); err != nil {
		return nil, err
	}
	if d.path, err = loopdev.Attach(d.image, loopdev.Options{}); err != nil {
		return nil, err
	}
	// Kept open, and told to go with the last that has it open: so it goes with
	// this program, however that ends.
	hold, err := os.Open(d.path)
	n.later(func(ctx context.Context) error { return n.release(ctx, d, hold) })
	if err == nil {
		err = loopdev.Detach(d.path)
	}
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(hold.Fd()), &st); err != nil {
		return nil, err
	}
	d.major, d.minor = unix.Major(st.Rdev), unix.Minor(st.Rdev)
	n.host.add(d.names()...)
	return d, n.makeFilesystem(ctx, d)
}

func (d *disk) names() []string { return []string{d.path, fmt.Sprintf("%d:%d", d.major, d.minor)} }

func (n *node) makeFilesystem(ctx context.Context, d *disk) error {
	args := mkfsArguments(d.path, madeSize)[n.opts.FSType]
	cmd := exec.CommandContext(ctx, "mkfs."+n.opts.FSType, args...) //nolint:gosec // one of three
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

// release lets go of the device and waits until it is gone.
func (n *node) release(ctx context.Context, d *disk, hold *os.File) error {
	err := errors.Join(d.setReadOnly(false), hold.Close())
	image, statErr := os.Stat(d.image)
	if err = errors.Join(err, statErr); err != nil {
		return err
	}
	err = eventually(ctx, 10*time.Second, func(context.Context) error {
		left, err := loopdev.Over(image)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("the loop device %s is still in use: a sandbox or the handler has it", d.path)
		}
		return err
	})
	n.host.remove(d.names()...)
	return err
}

// grow makes the device larger, as a CSI driver does.
func (d *disk) grow() error {
	if err := os.Truncate(d.image, grownSize); err != nil {
		return err
	}
	return loopdev.Grow(d.path)
}

// setReadOnly makes the device read-only, or not, as the broker does for a read-only
// volume. The kernel keeps that for whoever gets the loop device next.
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

// free fails while anybody has the device mounted or claimed, in whatever mount
// namespace.
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
