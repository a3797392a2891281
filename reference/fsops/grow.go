package fsops

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/disk/confine"
	"github.com/crust-proxy/crust-proxy/internal/ground/capture"
)

type plan struct {
	has, most int64 // bytes: now, and on this device
	grow      func() error
}

// Grow makes a mounted filesystem fill its device, and returns the size of the device; a filesystem may leave a small
// rest of it unused. The device must have at least minimum bytes and, unless maximum is 0, at most maximum bytes;
// otherwise nothing is changed. It is a success if the filesystem fills the device already.
func Grow(root, device int, minimum, maximum int64) (int64, error) {
	var size uint64
	if _, err := Ioctl(device, unix.BLKGETSIZE64, &size); err != nil {
		return 0, fmt.Errorf("ask for the size of the device: %w", err)
	}
	bytes := times(size, 1)
	if bytes < minimum {
		return 0, fmt.Errorf("grow the filesystem: its device has %d bytes, and at least %d are asked for: the device has to grow first: %w", bytes, minimum, ErrOutOfRange)
	}
	if maximum > 0 && bytes > maximum {
		return 0, fmt.Errorf("grow the filesystem: it would have the %d bytes of its device, and at most %d are asked for: %w", bytes, maximum, ErrOutOfRange)
	}
	dir, err := openDir(root, ".")
	if err != nil {
		return 0, fmt.Errorf("grow the filesystem: open its root directory: %w", err)
	}
	defer func() { _ = dir.Close() }()
	p, err := planFor(dir, device, bytes)
	if err != nil {
		return 0, err
	}
	if p.has >= p.most {
		return bytes, nil
	}
	if err := p.grow(); err != nil {
		return 0, fmt.Errorf("grow the filesystem from %d to %d bytes: %w", p.has, p.most, err)
	}
	return bytes, nil
}

// planFor compares a filesystem with its device, which has this many bytes.
func planFor(dir *os.File, device int, bytes int64) (*plan, error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fdOf(dir), &fs); err != nil {
		return nil, fmt.Errorf("compare the filesystem with its device: statfs: %w", err)
	}
	var p *plan
	var err error
	switch fs.Type {
	case unix.EXT4_SUPER_MAGIC:
		p, err = planExt(dir, device, bytes)
	case unix.XFS_SUPER_MAGIC:
		p, err = planXFS(dir, device, bytes)
	case unix.BTRFS_SUPER_MAGIC:
		p, err = planBtrfs(dir, device, bytes)
	default:
		err = fmt.Errorf("a filesystem of type %#x cannot grow while it is mounted: ext4, xfs and btrfs can: %w", fs.Type, ErrUnsupported)
	}
	if err != nil {
		return nil, fmt.Errorf("compare the filesystem with its device: %w", err)
	}
	return p, nil
}

func planBtrfs(dir *os.File, device int, size int64) (*plan, error) {
	fs, devices, err := btrfsDevices(fdOf(dir))
	if err != nil {
		return nil, err
	}
	var want unix.Stat_t
	if err := unix.Fstat(device, &want); err != nil {
		return nil, err
	}
	i := slices.IndexFunc(devices, func(info btrfsDevInfo) bool {
		// A single device needs no comparison. Its name may be one of another mount namespace.
		number, err := info.number()
		return fs.Devices == 1 || err == nil && number == want.Rdev
	})
	if i < 0 {
		return nil, fmt.Errorf("the device %d:%d is none of the %d devices of this btrfs", unix.Major(want.Rdev), unix.Minor(want.Rdev), fs.Devices)
	}
	member := devices[i]
	sector := int64(max(fs.Sector, 512))
	return &plan{has: times(member.TotalBytes, 1), most: size / sector * sector, grow: func() error {
		args := btrfsVolArgs{}
		copy(args.Name[:], fmt.Sprintf("%d:max", member.DevID))
		// A positive result is an error too.
		busy, err := Ioctl(fdOf(dir), btrfsIocResize, &args)
		if err == nil && busy != 0 {
			return fmt.Errorf("btrfs is at work on its devices (balance, replace or the like); try again when that has ended: %w", unix.EBUSY)
		}
		return err
	}}, nil
}

// extIocResizeFS is of the kernel's linux/ext4.h; older headers lack it.
const extIocResizeFS = 0x40086610

// fdReader reads from a descriptor that it does not own.
type fdReader int

func (fd fdReader) ReadAt(p []byte, at int64) (int, error) {
	n, err := unix.Pread(int(fd), p, at)
	if err == nil && n < len(p) {
		err = errors.New("the device is too small")
	}
	return max(n, 0), err
}

// planExt uses the superblock: statfs does not count the blocks that ext4 needs itself.
func planExt(dir *os.File, device int, bytes int64) (*plan, error) {
	if err := OnDevice(fdOf(dir), device); err != nil {
		return nil, err
	}
	super, err := readExt(fdReader(device))
	if err != nil {
		return nil, fmt.Errorf("read the superblock: %w", err)
	}
	if super == nil {
		return nil, errors.New("the device has no superblock of ext4")
	}
	blocks := uint64(super.fill(bytes)) //nolint:gosec // no size is negative
	return &plan{has: super.blocks * super.block, most: super.fill(bytes) * super.block, grow: func() error {
		_, err := Ioctl(fdOf(dir), extIocResizeFS, &blocks)
		if errors.Is(err, unix.EPERM) && !MayGrowMounted() {
			return fmt.Errorf("the kernel lets a mounted ext4 grow only with CAP_SYS_RESOURCE, which this process lacks: give it to containerd, or have the volume mounted anew, so that it grows before (%w): %w", err, ErrDenied)
		}
		if errors.Is(err, unix.EPERM) {
			return fmt.Errorf("the kernel lets no ext4 grow that has errors on record: it needs e2fsck while it is not mounted: %w", err)
		}
		if errors.Is(err, unix.EOPNOTSUPP) {
			return fmt.Errorf("this ext4 was made without what growing takes (%w): %w", err, ErrUnsupported)
		}
		return err
	}}, nil
}

// MayGrowMounted reports whether the kernel lets this process grow a mounted ext4. It needs no permission for the others.
func MayGrowMounted() bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	err := unix.Capget(&header, &data[0])
	return err == nil && data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}

// From the kernel's xfs_fs.h.
const (
	xfsIocGeometry = 0x8070587c // version 4, which every kernel has
	xfsIocGrowData = 0x4010586e
	// xfsLeastGroup is the least size, in blocks, of the last group; a smaller rest of the device stays unused.
	xfsLeastGroup = 64
)

type xfsGeometry struct {
	Block, RTExtent, GroupBlocks, Groups uint32
	LogBlocks, Sector, Inode, MostInodes uint32
	DataBlocks                           uint64
	_                                    [9]uint64
}

type xfsGrowData struct {
	Blocks     uint64
	MostInodes uint32
	_          uint32
}

func planXFS(dir *os.File, device int, bytes int64) (*plan, error) {
	if err := OnDevice(fdOf(dir), device); err != nil {
		return nil, err
	}
	var is xfsGeometry
	if _, err := Ioctl(fdOf(dir), xfsIocGeometry, &is); err != nil {
		return nil, fmt.Errorf("ask xfs for its geometry: %w", err)
	}
	blocks := is.fill(bytes)
	return &plan{has: times(is.DataBlocks, uint64(is.Block)), most: times(blocks, uint64(is.Block)), grow: func() error {
		_, err := Ioctl(fdOf(dir), xfsIocGrowData, &xfsGrowData{Blocks: blocks, MostInodes: is.MostInodes})
		return err
	}}, nil
}

// fill returns how many blocks a filesystem has that fills a device.
func (is *xfsGeometry) fill(device int64) uint64 {
	if is.Block == 0 || is.GroupBlocks == 0 {
		return 0
	}
	blocks := uint64(device) / uint64(is.Block) //nolint:gosec // no size is negative
	if rest := blocks % uint64(is.GroupBlocks); rest < xfsLeastGroup {
		return blocks - rest
	}
	return blocks
}

// GrowUnmounted makes an ext4 that is not mounted fill its device. To grow a mounted ext4 takes CAP_SYS_RESOURCE, which
// root in a container may lack. Other filesystems can only grow while they are mounted, and nothing is done.
//
// It needs e2fsck and resize2fs, which run confined. The end of ctx kills e2fsck, which can be run again, but never
// resize2fs, which has no limits of memory and time: a filesystem may be lost if its growth is interrupted. The path
// may be that of an open descriptor, /proc/PID/fd/N.
func GrowUnmounted(ctx context.Context, device, fsType string) error {
	if !strings.HasPrefix(fsType, "ext") {
		return nil
	}
	size, full, err := extFull(device)
	if err != nil {
		return fmt.Errorf("compare the filesystem of %s with its device: %w", device, err)
	}
	if full {
		return nil
	}
	file, err := os.OpenFile(device, unix.O_PATH, 0) //nolint:gosec // the caller names the device
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	box := confine.Box{Device: file, Memory: confine.Memory(size), CPU: mostCPU}
	check := exec.CommandContext(ctx, "e2fsck", "-f", "-p", childDevice)
	err = runTool(check, box)
	if repaired := check.ProcessState != nil && check.ProcessState.ExitCode() == 1; err != nil && !repaired {
		return fmt.Errorf("check the filesystem of %s before it grows: %w", device, err)
	}
	if err := runTool(exec.Command("resize2fs", childDevice), confine.Box{Device: file}); err != nil {
		return fmt.Errorf("grow the filesystem of %s: %w", device, err)
	}
	return nil
}

const (
	// childDevice is the device as a program has it.
	childDevice = "/proc/self/fd/3"
	mostCPU     = 10 * time.Minute
	// mostOutput bounds the captured output of a program.
	mostOutput = 16 << 10
)

// runTool runs a program so that it survives this process: in its own session, and writing to memory, not to a pipe.
func runTool(cmd *exec.Cmd, box confine.Box) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.ExtraFiles = []*os.File{box.Device}
	out, err := capture.Run(cmd, box.Start, mostOutput, mostOutput)
	if err == nil && !cmd.ProcessState.Success() {
		err = fmt.Errorf("%s: %s%s", cmd.ProcessState, out.Stdout, out.Stderr)
	}
	return err
}

// extFull returns the size of a device, and whether its filesystem fills it, or there is none.
func extFull(device string) (size int64, full bool, err error) {
	file, err := os.Open(device) //nolint:gosec // the caller names the device
	if err != nil {
		return 0, false, err
	}
	defer func() { _ = file.Close() }()
	super, err := readExt(file)
	if err != nil {
		return 0, false, fmt.Errorf("read its superblock: %w", err)
	}
	size, err = file.Seek(0, 2)
	return size, super == nil || super.blocks >= super.fill(size), err
}
