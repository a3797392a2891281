package mkfs

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/disk/confine"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// device is the device of a job: an open descriptor from first to last, and its lock.
type device struct {
	f   *Formatter
	req Request

	file   *os.File // O_PATH, a duplicate of the caller's
	lock   *os.File
	number uint64 // what the device is
	size   int64  // at the last examination
	intent intent
}

// box is what a program that is given the device may have, and may be ended at any time. No limit of ours may end mkfs
// or resize2fs half-way.
func (d *device) box() confine.Box {
	return confine.Box{Device: d.file, Memory: confine.Memory(d.size), CPU: d.f.cfg.Timeout}
}

func (d *device) errorf(kind volume.Kind, format string, args ...any) error {
	return volume.Errorf(kind, "volume %s: the device %s: %w", d.req.Volume, d.req.Path, fmt.Errorf(format, args...))
}

// canceledError is the error for a caller whose context has ended.
func (d *device) canceledError(cause error) error {
	return d.errorf(volume.ContextKind(cause), "the caller went away before it was looked at; nothing was written: %w", cause)
}

// duplicate makes a descriptor of our own: a job can outlive its caller. If it fails, close the device.
func (d *device) duplicate() error {
	fd, err := unix.FcntlInt(uintptr(d.req.Device), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return d.errorf(volume.Internal, "its descriptor cannot be kept: %w", err)
	}
	d.file = os.NewFile(uintptr(fd), "device")
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return d.errorf(volume.Internal, "cannot be looked at: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return d.errorf(volume.Invalid, "is no block device")
	}
	d.number = st.Rdev
	name := sha256.Sum256([]byte(cmp.Or(d.req.ID, fmt.Sprint("device ", d.number))))
	d.intent = intent(filepath.Join(filepath.Dir(d.f.cfg.LockFile), "unfinished", fmt.Sprintf("%x", name)))
	return nil
}

func (d *device) close() {
	closeFile(d.file)
	sys.CloseFileAlone(d.lock)
}

const (
	lockWait  = 2 * time.Second
	pollEvery = 10 * time.Millisecond
)

// acquireLock locks this device number. The lock belongs to an open file, not to a process: mkfs
// inherits it, so it ends with the last of both. The device alone does not show a running
// mkfs.btrfs, which tests O_EXCL and closes the descriptor again.
func (d *device) acquireLock(ctx context.Context) (err error) {
	// One byte of the file stands for one device, so nothing has to be removed.
	place := int64(unix.Major(d.number))<<20 | int64(unix.Minor(d.number))
	d.lock, err = d.lockByte(ctx, place, lockWait)
	if err == nil && d.lock == nil {
		return d.errorf(volume.Busy, "is being examined or formatted, perhaps by an mkfs that was started before this "+
			"daemon was restarted: repeat the call when it has ended")
	}
	return err
}

// lockByte opens the lock file and locks a byte of it. It returns nil if somebody else still has
// the byte when the wait ends.
func (d *device) lockByte(ctx context.Context, place int64, wait time.Duration) (*os.File, error) {
	file, err := os.OpenFile(d.f.cfg.LockFile, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, d.errorf(volume.Internal, "cannot be locked: %w", err)
	}
	for until := time.Now().Add(wait); ; {
		lock := unix.Flock_t{Type: unix.F_WRLCK, Whence: unix.SEEK_SET, Start: place, Len: 1}
		err := unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &lock)
		switch {
		case err == nil:
			return file, nil
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EINTR):
			err = d.errorf(volume.Internal, "cannot be locked: %w", err)
		case time.Now().After(until):
			err = nil
		case sys.Sleep(ctx, pollEvery):
			continue
		default:
			err = d.canceledError(ctx.Err())
		}
		closeFile(file)
		return nil, err
	}
}

// checkingByte is the byte of the lock file that allows only one e2fsck at a time on the node. It
// is after the bytes of all devices.
const checkingByte = 1 << 62

// writingLock is the byte of the lock file that stands for a volume which is written to.
// Those of devices lie before all of them.
func writingLock(id string) unix.Flock_t {
	sum := sha256.Sum256([]byte(id))
	const first = 1 << 61
	place := int64(binary.BigEndian.Uint64(sum[:]) % first)
	return unix.Flock_t{Type: unix.F_WRLCK, Whence: unix.SEEK_SET, Start: first + place, Len: 1}
}

// heldWait bounds the wait for a program that has the device open for a moment.
const heldWait = 500 * time.Millisecond

// open opens the device anew, by its descriptor.
func (d *device) open(flags int) (*os.File, error) {
	fd, err := unix.Open(sys.ProcFD(int(d.file.Fd())), flags|unix.O_CLOEXEC, 0)
	if err == nil {
		return os.NewFile(uintptr(fd), d.req.Path), nil
	}
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, d.errorf(unmet, "is mounted, or held by another program or device of this node (see findmnt, "+
			"lsblk and /sys/dev/block/%d:%d/holders): %w", unix.Major(d.number), unix.Minor(d.number), err)
	case errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENOMEDIUM):
		return nil, d.errorf(volume.NotFound, "is no longer there: has the driver attached it? %w", err)
	case errors.Is(err, unix.EROFS):
		return nil, d.errorf(unmet, "is write-protected: %w", err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return nil, d.errorf(volume.Internal, "cannot be opened: is its node on a nodev mount, or the device "+
			"not allowed to this service? %w", err)
	default:
		return nil, d.errorf(volume.Internal, "cannot be opened: %w", err)
	}
}

// openAlone opens the device so that nobody else can mount or hold it meanwhile, and past the page
// cache, so that reads return what the device has.
func (d *device) openAlone(ctx context.Context, mode int) (*os.File, error) {
	until := time.Now().Add(heldWait)
	for {
		file, err := d.open(mode | unix.O_EXCL | unix.O_DIRECT)
		if err == nil || !errors.Is(err, unix.EBUSY) {
			return file, err
		}
		if d.req.ReadOnly && mode == unix.O_RDONLY {
			// Nothing will be written, and read-only owners share a device.
			return d.open(mode | unix.O_DIRECT)
		}
		if time.Now().After(until) {
			return nil, err
		}
		if !sys.Sleep(ctx, pollEvery) {
			return nil, d.canceledError(ctx.Err())
		}
	}
}

// work is what was begun on a filesystem and must be completed before a sandbox gets it.
type work string

const (
	workMaking  work = "making"  // its root directory lacks its mode
	workGrowing work = "growing" // resize2fs was started
)

// intent is the file that records what was begun on a volume. It is in the directory of the lock
// file, where no guest can write: the contents of a filesystem never decide which program runs.
type intent string

// begin records what is begun on the filesystem with this UUID.
func (i intent) begin(w work, uuid string) error {
	err := os.MkdirAll(filepath.Dir(string(i)), 0o700)
	if err == nil {
		err = os.WriteFile(string(i), []byte(string(w)+" "+uuid), 0o600)
	}
	if err != nil {
		return fmt.Errorf("nothing was written to it, because the intent cannot be recorded: %w", err)
	}
	return nil
}

func (i intent) end() error {
	if err := os.Remove(string(i)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("its intent is complete but cannot be removed: %w", err)
	}
	return nil
}

// begun returns what was begun, and the UUID of the filesystem. An intent for another UUID is for
// an earlier filesystem of the volume.
func (i intent) begun() (w work, uuid string, err error) {
	raw, err := os.ReadFile(string(i))
	if errors.Is(err, fs.ErrNotExist) {
		return "", "", nil
	}
	if err != nil {
		return "", "", fmt.Errorf("it is not known whether mkfs or resize2fs was interrupted on it: %w", err)
	}
	what, uuid, _ := strings.Cut(string(raw), " ")
	return work(what), uuid, nil
}
