// Package mkfs examines a block device before a sandbox gets it and, if the policy says so and the device is blank,
// makes a filesystem on it. Nothing else in this module writes to devices of volumes.
//
// How it protects data:
//
//   - The device is one open descriptor, and no name is resolved. Programs inherit it as
//     descriptor 3, and are confined to it.
//   - One lock per device number, in a file of ours, is held during the examination. mkfs
//     inherits it: while an mkfs that an earlier daemon started still runs, the device is busy.
//   - The device is examined under an O_EXCL open: not while it is mounted, held or part of
//     another one.
//   - Blank means that blkid finds nothing, and that we read, past the page cache, only zeros
//     in the first and the last MiB, and no superblock where copies of one are stored. A
//     failed read is an error.
//   - mkfs runs without force, and with a new UUID: only a filesystem with this UUID is ours.
//     If mkfs fails, what it wrote is cleared at once, but never a filesystem with another UUID.
//   - mkfs is never killed: neither when the caller goes away, nor when we end, nor by a limit.
//     Until it has ended, CheckWriting refuses to give the volume away.
//
// An ext4 that is smaller than its device is grown if the caller asks for it: e2fsck and resize2fs write to it, under
// the same lock. What was begun on a volume is on record in a directory beside the lock file until it has ended.
package mkfs

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// unmet is the kind of each refusal because of the contents of a device. In gRPC it is FAILED_PRECONDITION.
const unmet = volume.InUse

const defaultTimeout = 10 * time.Minute

// Config is what a Formatter is made of.
type Config struct {
	Log *zap.Logger
	// LockFile is created if it is missing. It must be the same after each restart, in a
	// directory that only root may write.
	LockFile string
	// Timeout bounds the wait for one mkfs; 0 means 10 minutes. An mkfs that takes
	// longer goes on by itself, and the device is busy until it has ended.
	Timeout time.Duration
	// ToolDirs are searched for blkid and mkfs; nil means the system's.
	ToolDirs []string
	// AcceptLeftovers treats a device as blank that has bytes without a signature, as
	// drivers themselves do. Thick LVM volumes may need it.
	AcceptLeftovers bool
}

// Formatter prepares devices. Many goroutines may use one.
type Formatter struct{ cfg Config }

// New makes a Formatter.
func New(c Config) *Formatter {
	if c.Timeout <= 0 {
		c.Timeout = defaultTimeout
	}
	c.Log = cmp.Or(c.Log, zap.NewNop())
	if c.ToolDirs == nil {
		c.ToolDirs = []string{"/usr/sbin", "/usr/bin", "/sbin", "/bin"}
	}
	return &Formatter{cfg: c}
}

// Request is one device to prepare.
type Request struct {
	// Device is an O_PATH descriptor of the checked block device.
	Device int
	// Volume and Path name it in errors.
	Volume, Path string
	// ID names the volume for CheckWriting, whatever device shows it; it may be empty.
	ID     string
	FSType string
	Policy volume.FormatPolicy
	// ReadOnly: nothing is ever written.
	ReadOnly bool
	// Options are arguments for mkfs that CheckOptions has accepted.
	Options []string
	// Root is the root directory of a new filesystem.
	Root Root
	// Grow has an ext4 grown that is smaller than its device.
	Grow bool
}

// Prepare makes sure that a device holds the filesystem, and reports whether it made it.
//
// The caller's context ends the examination, never an mkfs: Prepare returns when that has ended, or with a Timeout if
// it takes longer than the Formatter's bound. Until then, the next attempt fails with Busy. A device that the caller
// itself holds with O_EXCL is in use, unless the request is read-only.
func (f *Formatter) Prepare(ctx context.Context, r Request) (formatted bool, err error) {
	if r.Policy == volume.FormatUnset {
		r.Policy = volume.FormatHost
	}
	j := &job{f: f, req: r, dev: &device{f: f, req: r}}
	return j.start(ctx, j.run)
}

// CheckWriting returns an error while a program writes to the device of the volume with
// this ID, also one that an earlier daemon started, and if that is not known. It needs no device.
func (f *Formatter) CheckWriting(id string) error {
	file, err := os.OpenFile(f.cfg.LockFile, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	lock := writingLock(id)
	if err == nil {
		defer closeFile(file)
		err = unix.FcntlFlock(file.Fd(), unix.F_OFD_GETLK, &lock)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist): // no device was ever examined
		return nil
	case err != nil:
		return volume.Errorf(volume.Busy, "it cannot be seen whether mkfs still writes to the device: %w", err)
	case lock.Type != unix.F_UNLCK:
		return volume.Errorf(volume.Busy, "mkfs or resize2fs still writes to the device: repeat the call when it has ended")
	}
	return nil
}

// closeFile closes a file that is read-only, O_PATH or synced; nil is allowed.
func closeFile(file *os.File) { _ = file.Close() }

// CheckReplay refuses a read-only device whose filesystem was not unmounted cleanly: a mount has to replay the journal,
// and cannot write to the device. Nothing is written, and the caller's context ends the examination.
func (f *Formatter) CheckReplay(ctx context.Context, r Request) error {
	r.ReadOnly, r.Policy = true, volume.FormatNever
	j := &job{f: f, req: r, dev: &device{f: f, req: r}}
	_, err := j.start(ctx, func(context.Context) (bool, error) { return false, j.dev.refuseReplay(j.req.FSType) })
	return err
}
