package backup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

type target struct {
	file *os.File
	size int64 // of a device it may be more than the volume's
	// complete syncs it, and gives a file its name.
	complete func() error

	has   [mostData]byte // the buffer for reading it
	right int64          // bytes that were right already
}

// openTarget opens a block device that is not in use, or begins a new file.
func openTarget(path string, size int64) (*target, error) {
	info, err := os.Stat(path)
	if err == nil && info.Mode().Type() == os.ModeDevice {
		return openDevice(path, size)
	}
	part, err := openPartial(path)
	if err != nil {
		return nil, err
	}
	// A file that an interrupted restore left is empty, or has the volume's size.
	left, err := part.file.Stat()
	if err == nil && left.Size() != 0 && left.Size() != size {
		err = notOurs(part.file.Name(), left.Size(), size)
	}
	if err == nil {
		err = part.file.Truncate(size)
	}
	if err != nil {
		return nil, errors.Join(err, part.file.Close())
	}
	return &target{file: part.file, size: size, complete: part.complete}, nil
}

// openDevice opens a device exclusively. The kernel refuses that if the device is mounted, or
// opened exclusively by another process, as crust-proxy does for VMs.
func openDevice(path string, size int64) (*target, error) {
	file, err := os.OpenFile(path, os.O_RDWR|unix.O_EXCL, 0) //nolint:gosec // the caller names it
	if errors.Is(err, unix.EBUSY) {
		return nil, inUse(path)
	}
	if err != nil {
		return nil, err
	}
	// Who has it open, not exclusively, may be a VM that writes to it.
	finder := openers.New()
	users, err := finder.Await(context.Background(), openers.Query{FD: int(file.Fd()), Own: 1, Claimed: true}, openedWait)
	if err == nil && users.Names == "" {
		users.Names, err = usersOfDisk(finder, file)
	}
	if err := refusal(path, users, err, openers.NewScanner(nil).Blind()); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	has, err := file.Seek(0, io.SeekEnd)
	if err == nil && has < size {
		err = tooSmall(path, has, size)
	}
	if err == nil {
		err = uncache(file)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return &target{file: file, size: has, complete: file.Sync}, nil
}

// usersOfDisk names a process that has the disk of a partition open: the partition's own count does not have it.
// The users of other partitions are none.
func usersOfDisk(finder *openers.Finder, partition *os.File) (string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(partition.Fd()), &st); err != nil {
		return "", err
	}
	node, err := diskOf("/sys/dev/block/" + openers.Number(unix.Major(st.Rdev), unix.Minor(st.Rdev)))
	if err != nil || node == "" {
		return "", err
	}
	disk, err := os.Open(node) //nolint:gosec // the kernel's own name
	if err != nil {
		return "", err
	}
	defer func() { _ = disk.Close() }() // only asked about
	return awaitNone(func() ([]openers.Holder, error) {
		return finder.Holders(context.Background(), openers.Query{FD: int(disk.Fd()), Own: 1})
	}, func() bool {
		// The kernel counts at the disk what its partitions are open, too.
		all, err := finder.Await(context.Background(), openers.Query{FD: int(disk.Fd()), Own: 2}, 0)
		return err == nil && all.Names == ""
	})
}

// diskOf returns the node of a partition's disk, or "" for a device that is no partition. Dir is its directory in sysfs.
func diskOf(dir string) (node string, err error) {
	if _, err := os.Stat(dir + "/partition"); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	number := openers.File{Block: true}
	name, err := sys.ReadLine(dir + "/../dev")
	_, _ = fmt.Sscanf(name, "%d:%d", &number.Major, &number.Minor)
	if node = openers.NodeOf(number); err == nil && node == "" {
		err = noNode(name)
	}
	return node, err
}

// awaitNone waits until there are no holders, and names one that stays. Where they are not known, free may know it.
func awaitNone(holders func() ([]openers.Holder, error), free func() bool) (string, error) {
	for deadline := time.Now().Add(openedWait); ; time.Sleep(openedWait / 20) {
		users, err := holders()
		switch last := !time.Now().Before(deadline); {
		case len(users) == 0 && (err == nil || free()):
			return "", nil
		case last && len(users) > 0:
			return users[0].String() + ", which has its disk open", nil
		case last:
			return "", err
		}
	}
}

// openedWait bounds the wait for a program that only probes the device.
const openedWait = time.Second

// refusal decides by who has the device open, and by why that is not known. blind is not nil where this process
// does not see those of the node. Where it cannot be told, as in a container without rights, O_EXCL has to do.
func refusal(path string, users openers.Users, err, blind error) error {
	switch {
	case err == nil && users.Names != "":
		return openedBy(path, users.Names)
	case err == nil || blind != nil || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES):
		return nil
	}
	return maybeOpened(path, err)
}

// zeroStep bounds how long one call to the kernel takes.
const zeroStep = 1 << 30

var zeros [mostData]byte

// write writes data, unless the target has the same data already, which an interrupted restore
// may have written. That is decided only by reading the target.
func (t *target) write(data []byte, at int64) error {
	has := t.has[:len(data)]
	if n, _ := t.file.ReadAt(has, at); n == len(data) && bytes.Equal(has, data) { // if it cannot be read, it is written
		t.right += int64(n)
		return nil
	}
	_, err := t.file.WriteAt(data, at)
	return err
}

// zero sets a range of the target to zero, as a hole if that is possible.
func (t *target) zero(ctx context.Context, from, to int64) error {
	for at := from; at < to && ctx.Err() == nil; {
		end := min((at/zeroStep+1)*zeroStep, to)
		err := unix.Fallocate(int(t.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, end-at)
		// A device may not support holes, and only whole sectors can be one.
		if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
			end = min((at/mostData+1)*mostData, to)
			err = t.write(zeros[:end-at], at)
		}
		if err != nil {
			return fmt.Errorf("write zeros at byte %d: %w", at, err)
		}
		at = end
	}
	return ctx.Err()
}
