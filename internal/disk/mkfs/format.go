// Package mkfs looks at a block device that is about to be handed to a sandbox
// and, where policy says so and only where the device is blank, makes a
// filesystem on it. Nothing else in this module writes to anybody's device.
//
// What keeps data safe, in the order in which it takes hold:
//
//   - The device is an open descriptor from first to last. Programs get it as
//     their own descriptor 3; no name is ever resolved. They are confined to it.
//   - One lock per device number, in a file of ours, is held over the whole look
//     and inherited by mkfs: while an mkfs of an earlier life still runs, the
//     device is busy, whatever mkfs itself does to keep others out.
//   - The look happens under an O_EXCL open: not while the device is mounted, held
//     or part of another one.
//   - Blank means that blkid finds nothing AND that we read, past the page cache,
//     nothing but zeros in the first and the last MiB and no superblock in the
//     places where copies of one are kept. What cannot be read is an error.
//   - mkfs is run without force, and with a UUID that was drawn for it: only a
//     filesystem that bears it is called ours afterwards. Where mkfs failed, what
//     it left is cleared at once, but never a filesystem with another UUID.
//   - mkfs is never killed: not when the caller goes away, not when we end, nor by a
//     limit. Until it has ended, CheckWriting keeps the volume from being given away.
//
// Beyond that, an ext4 that is smaller than its device is grown where the caller asks
// for it: e2fsck and resize2fs write to it, under the same lock. What was begun on a
// volume is on record in a directory beside the lock file until it has ended.
package mkfs

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// unmet is the kind of every refusal that has to do with what is on the device:
// on the wire it is FAILED_PRECONDITION.
const unmet = volume.InUse

const defaultTimeout = 10 * time.Minute

// Config is what a Formatter is made of.
type Config struct {
	Log *zap.Logger
	// LockFile is made where it is missing. Every life of the daemon must use the
	// same one, in a directory that only root may write.
	LockFile string
	// Timeout bounds the wait for one mkfs; 0 means 10 minutes. An mkfs that takes
	// longer goes on by itself, and the device is busy until it has ended.
	Timeout time.Duration
	// ToolDirs are searched for blkid and mkfs; nil means the system's.
	ToolDirs []string
	// AcceptLeftovers calls a device blank that holds bytes without a signature,
	// as stock CSI drivers do. Thick LVM volumes may need it.
	AcceptLeftovers bool
}

// Formatter prepares devices. Many goroutines may use one.
type Formatter struct{ cfg Config }

// New makes a Formatter.
func New(c Config) *Formatter {
	if c.Timeout <= 0 {
		c.Timeout = defaultTimeout
	}
	if c.Log == nil {
		c.Log = zap.NewNop()
	}
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

// Prepare makes sure that a device holds the filesystem, and tells whether it made it.
//
// The caller's context ends the look, never an mkfs: Prepare returns when that
// has ended, or with a Timeout when it takes longer than the Formatter's bound.
// While anything of an attempt still runs, the next one gets Busy.
//
// A device that the caller itself holds with O_EXCL is in use, unless readOnly.
func (f *Formatter) Prepare(ctx context.Context, r Request) (formatted bool, err error) {
	if r.Policy == volume.FormatUnset {
		r.Policy = volume.FormatHost
	}
	j := &job{f: f, req: r, dev: &device{f: f, req: r}}
	return j.start(ctx, j.run)
}

// CheckWriting returns an error while a program writes to the device of the volume with
// this ID, be it one that an earlier life of the daemon started. It works without the
// device. Where it cannot be known, that is the error.
func (f *Formatter) CheckWriting(id string) error {
	file, err := os.OpenFile(f.cfg.LockFile, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // nothing was ever looked at
	}
	if err != nil {
		return volume.Errorf(volume.Busy, "it cannot be seen whether mkfs still writes to the device: %w", err)
	}
	defer closeFile(file)
	lock := writingLock(id)
	switch err := unix.FcntlFlock(file.Fd(), unix.F_OFD_GETLK, &lock); {
	case err != nil:
		return volume.Errorf(volume.Busy, "it cannot be seen whether mkfs still writes to the device: %w", err)
	case lock.Type != unix.F_UNLCK:
		return volume.Errorf(volume.Busy, "mkfs or resize2fs still writes to the device: repeat the call when it has ended")
	}
	return nil
}

func closeFile(file *os.File) {
	if file != nil {
		_ = file.Close() // read-only, O_PATH or synced before
	}
}

// CheckReplay refuses a device that is to be read-only while its filesystem was
// not unmounted cleanly: whoever mounts it would have to replay the journal, and
// cannot write to the device. Nothing is written, and the caller's context ends
// the look.
func (f *Formatter) CheckReplay(ctx context.Context, r Request) error {
	r.ReadOnly, r.Policy = true, volume.FormatNever
	j := &job{f: f, req: r, dev: &device{f: f, req: r}}
	_, err := j.start(ctx, func(context.Context) (bool, error) { return false, j.dev.refuseReplay(j.req.FSType) })
	return err
}
