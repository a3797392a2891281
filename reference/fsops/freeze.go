package fsops

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/reference/process"
)

// Freezer stops all writes to filesystems for a bounded time. By its records, another process can thaw.
type Freezer struct {
	// Dir holds the records. It is on a tmpfs: a reboot ends records and freezes together. It is made if it is missing.
	Dir string
	// Watchdog is the command line that makes this program call Watch, with three arguments that are appended to it.
	Watchdog []string
	// ControlGroup is the control group to which watchdogs are moved, if set, so that they are not killed with the
	// group of the process that started them. A watchdog that cannot be moved still works.
	ControlGroup string
}

// MostFrozen is the longest time for which a filesystem can be frozen.
const MostFrozen = 10 * time.Minute

// recordTimeout bounds the wait for a record that another process has locked: a freeze writes all dirty data first.
const recordTimeout = 20 * time.Second

// From the kernel's linux/fs.h.
const (
	fiFreeze = 0xc0045877
	fiThaw   = 0xc0045878
)

// Freeze writes all dirty data and then stops all writes to the filesystem of a root directory, until Thaw is called
// with the same key or the time is over. Two watchdog processes are running before anything stops: one of them is
// enough to thaw the filesystem, whatever else dies. A watchdog that gets SIGTERM thaws at once.
func (f Freezer) Freeze(key string, root int, timeout time.Duration) error {
	if timeout <= 0 || timeout > MostFrozen {
		return fmt.Errorf("freeze the filesystem: for %v: it is possible for at most %v: %w", timeout, MostFrozen, ErrOutOfRange)
	}
	useless, err := f.freeze(key, root, timeout)
	end(useless)
	if err != nil {
		return fmt.Errorf("freeze the filesystem: %w", err)
	}
	return nil
}

// freeze unlocks the record before it returns the watchdogs that are no longer needed: they lock it before they end.
func (f Freezer) freeze(key string, root int, timeout time.Duration) (useless []process.Process, err error) {
	dir, err := openDir(root, ".")
	if err != nil {
		return nil, fmt.Errorf("open its root directory: %w", err)
	}
	defer func() { _ = dir.Close() }()
	name, err := recordName(fdOf(dir))
	if err != nil {
		return nil, err
	}
	places, err := f.open()
	if err != nil {
		return nil, err
	}
	defer func() { _ = places.Close() }()
	rec, err := lockRecord(fdOf(places), name, recordTimeout)
	if err != nil {
		return nil, err
	}
	defer rec.close()
	useless, err = rec.takeOver(dir)
	if err != nil {
		return nil, err
	}
	// The kernel stops all writes before it writes the dirty data, however long that takes.
	// Write most of it now, while no writer waits. The freeze itself reports write errors.
	_ = unix.Syncfs(fdOf(dir))
	now := state{Key: key, Token: rand.Text(), Deadline: clock() + timeout.Nanoseconds()}
	now.Watchdogs, err = f.arm(dir, places, name, &now)
	if err == nil {
		err = rec.freeze(dir, &now)
	}
	if err != nil {
		rec.remove()
		useless = append(useless, now.Watchdogs...)
	}
	return useless, err
}

// freeze stops the writes and records that. What it records before is enough for the watchdogs to thaw.
func (r *record) freeze(dir *os.File, now *state) error {
	if err := r.write(now); err != nil {
		return err
	}
	failpoint.Hit("freeze-armed")
	if err := freezeFS(fdOf(dir)); err != nil {
		return err
	}
	failpoint.Hit("freeze-frozen")
	now.Frozen = true
	err := r.write(now)
	if err == nil && clock() >= now.Deadline {
		err = errors.New("starting its watchdogs and writing what was dirty took all the time; ask for more")
	}
	if err != nil {
		_, _ = thawFS(fdOf(dir))
	}
	return err
}

// takeOver thaws what an earlier, unfinished freeze has left, and returns its watchdogs.
func (r *record) takeOver(dir *os.File) ([]process.Process, error) {
	was, err := r.read()
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if was.Frozen && clock() < was.Deadline {
		// The record is still there for who would thaw it if this process is killed before it does.
		err := freezeFS(fdOf(dir))
		if errors.Is(err, ErrFrozen) {
			return nil, fmt.Errorf("it was frozen before and will be for another %v: %w", time.Duration(was.Deadline-clock()).Round(time.Second), ErrFrozen)
		}
		if err != nil {
			return nil, err
		}
	}
	// Its freezer died before it could report success, both watchdogs died, or somebody else has thawed it.
	_, err = thawFS(fdOf(dir))
	return was.Watchdogs, err
}

func freezeFS(root int) error {
	var unused int32
	_, err := Ioctl(root, fiFreeze, &unused)
	switch {
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("another program has frozen it: %w", ErrFrozen)
	case errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("a filesystem of this type cannot be frozen: %w", ErrUnsupported)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("it takes CAP_SYS_ADMIN: %w", ErrDenied)
	}
	return err
}

// thawFS lets writes continue, and reports whether they were stopped.
func thawFS(root int) (was bool, err error) {
	var unused int32
	_, err = Ioctl(root, fiThaw, &unused)
	if errors.Is(err, unix.EINVAL) {
		return false, nil
	}
	return err == nil, err
}

// recordName returns the same name for a filesystem at each of its mounts.
func recordName(root int) (string, error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(root, &fs); err != nil {
		return "", fmt.Errorf("statfs: %w", err)
	}
	if fs.Type == unix.BTRFS_SUPER_MAGIC { // each subvolume has a device number of its own
		// An O_PATH descriptor cannot be used for an ioctl.
		dir, err := unix.Openat(root, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return "", fmt.Errorf("open the root directory: %w", err)
		}
		defer func() { _ = unix.Close(dir) }()
		var info btrfsFSInfo
		_, err = Ioctl(dir, btrfsIocFSInfo, &info)
		return "btrfs-" + hex.EncodeToString(info.FSID[:]), err
	}
	var st unix.Stat_t
	err := unix.Fstat(root, &st)
	dev := uint64(st.Dev) //nolint:unconvert // narrower on other architectures
	return fmt.Sprintf("device-%d-%d", unix.Major(dev), unix.Minor(dev)), err
}

// clock returns a time that is the same in all processes and never jumps.
func clock() int64 {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return 0 // it never fails for this clock
	}
	return now.Nano()
}

func (f Freezer) open() (*os.File, error) {
	if err := os.MkdirAll(f.Dir, 0o700); err != nil {
		return nil, err
	}
	return os.Open(f.Dir)
}
