package mkfs

import (
	"cmp"
	"context"
	"io"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/disk/superblock"
	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// The phases of a job. A caller that goes away ends it during the examination; nothing ends it
// while it makes a filesystem.
const (
	examining int32 = iota
	making
	abandoned
)

// tries bounds how often a device is examined that another program opened in between.
const tries = 4

type job struct {
	f     *Formatter
	req   Request
	dev   *device
	phase atomic.Int32
}

// start runs the work under the device's lock, so that jobs for a device that hangs do not
// pile up, and waits for it as wait does.
func (j *job) start(ctx context.Context, work func(context.Context) (formatted bool, err error)) (formatted bool, err error) {
	switch j.req.Policy {
	case volume.FormatHost, volume.FormatNever, volume.FormatDriver:
	default:
		return false, j.dev.errorf(volume.Invalid, "unknown format policy %q: host or never", clip(string(j.req.Policy)))
	}
	if !nameForm().MatchString(j.req.FSType) {
		return false, j.dev.errorf(volume.Invalid, "%q is no filesystem type", clip(j.req.FSType))
	}
	if err := j.dev.duplicate(); err != nil {
		j.dev.close()
		return false, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan outcome, 1)
	go func() {
		formatted, err := false, j.dev.acquireLock(ctx)
		if err == nil {
			formatted, err = work(ctx)
		}
		j.dev.close()
		done <- outcome{formatted, err}
	}()
	return j.wait(ctx, done)
}

func (j *job) run(ctx context.Context) (formatted bool, err error) {
	for try := 1; ; try++ {
		formatted, err = j.attempt(ctx)
		if err == nil || volume.KindOf(err) != volume.Busy || try == tries {
			return formatted, err
		}
		if !sys.Sleep(ctx, pollEvery) {
			return false, err
		}
	}
}

// attempt examines the device, and formats it if that is allowed.
func (j *job) attempt(ctx context.Context) (formatted bool, err error) {
	if j.req.Policy == volume.FormatDriver {
		if err := j.checkGiven(ctx); err != nil {
			return false, err
		}
		return false, (&growth{j: j}).run(ctx)
	}
	found, err := j.dev.examine(ctx, false)
	if err != nil {
		return false, err
	}
	if err := j.checkContents(found); err != nil {
		return false, err
	}
	if found.lacksMode {
		if err := j.beginMaking(ctx); err != nil {
			return false, err
		}
		return false, j.complete(context.WithoutCancel(ctx))
	}
	if found.labelled() {
		j.f.cfg.Log.Warn("the label of an ext4 says that mkfs was interrupted, but there is no record of it: the filesystem is handed "+
			"over as it is, and its root directory may lack its mode", zap.String("target", j.req.Volume), zap.String("device", j.req.Path))
	}
	if !found.blank(j.f.cfg.AcceptLeftovers) {
		return false, (&growth{j: j}).run(ctx)
	}
	program, args, err := j.f.maker(j.req.FSType)
	if err != nil {
		return false, j.dev.errorf(volume.KindOf(err), "is blank, and %w", err)
	}
	if err := j.beginMaking(ctx); err != nil {
		return false, err
	}
	failpoint.Hit("format-before-mkfs")
	return j.make(context.WithoutCancel(ctx), program, args)
}

// beginMaking must be called before the device is written to. From then on the job goes
// on to its end. Programs that write inherit the volume's lock, as that of the device.
func (j *job) beginMaking(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return j.dev.canceledError(err)
	}
	if j.phase.Load() != making && !j.phase.CompareAndSwap(examining, making) {
		return j.dev.errorf(volume.Canceled, "the caller went away; nothing was written")
	}
	if j.req.ID == "" {
		return nil
	}
	lock := writingLock(j.req.ID)
	if err := unix.FcntlFlock(j.dev.lock.Fd(), unix.F_OFD_SETLK, &lock); err != nil {
		return j.dev.errorf(volume.Busy, "is not written to, because a device of the volume may still be: %w", err)
	}
	return nil
}

// checkContents refuses everything but fsType, and a blank device that may be formatted.
func (j *job) checkContents(found *contents) error {
	switch {
	case found.is(j.req.FSType) && found.unfinished: // an mkfs was killed
		return j.dev.errorf(unmet, "holds a %s whose making or copying was cut off: restore it, or, if nothing on it is "+
			"wanted, wipe it (wipefs -a, blkdiscard or dd) and publish again", j.req.FSType)
	case found.is(j.req.FSType):
		return j.checkMode(found)
	case !found.blank(j.f.cfg.AcceptLeftovers):
		return j.foreignError(found)
	case j.req.ReadOnly:
		return j.dev.errorf(unmet, "is blank, and the volume is read-only, so it is not formatted: "+
			"publish the volume read-write once, or make %s on it", j.req.FSType)
	case j.req.Policy == volume.FormatNever:
		return j.dev.errorf(unmet, "is blank, and the format policy is never, or guest, which no handler can do: make %s on it, "+
			"or set the policy to host", j.req.FSType)
	case found.writeProtected:
		return j.dev.errorf(unmet, "is blank and write-protected, so it cannot be formatted: "+
			"attach it read-write, or make %s on it elsewhere", j.req.FSType)
	default:
		return nil
	}
}

// checkMode refuses a filesystem that lacks the mode of its root directory, where that is not to be set.
func (j *job) checkMode(found *contents) error {
	if !found.lacksMode || j.req.Policy == volume.FormatHost && !j.req.ReadOnly && !found.writeProtected {
		return nil
	}
	return j.dev.errorf(unmet, "holds an ext4 whose making was interrupted: its root directory lacks its mode. "+
		"Publish the volume read-write once, with the format policy host")
}

func (j *job) foreignError(found *contents) error {
	const wipe = "if nothing on it is wanted, wipe it (wipefs -a, then blkdiscard or dd over its first and last MiB) and publish again"
	if what := found.signatures(); what != "" {
		return j.dev.errorf(unmet, "holds %s where %s is wanted. It is not formatted: correct the volume's filesystem type "+
			"or the device; %s", what, j.req.FSType, wipe)
	}
	return j.dev.errorf(unmet, "holds no known signature, but is not blank either: there is data at byte %d. "+
		"It is not formatted: find out what that is; %s", found.dataAt, wipe)
}

type outcome struct {
	formatted bool
	err       error
}

// wait waits for the job. A device can hang each caller in the kernel. Then wait returns, while
// the job has its own descriptors and the lock.
func (j *job) wait(ctx context.Context, done <-chan outcome) (bool, error) {
	bound := time.NewTimer(j.f.cfg.Timeout)
	defer bound.Stop()
	gone := ctx.Done()
	for {
		select {
		case out := <-done:
			return out.formatted, out.err
		case <-gone:
			if j.phase.CompareAndSwap(examining, abandoned) {
				return false, j.dev.canceledError(ctx.Err())
			}
			gone = nil
		case <-bound.C:
			return false, j.timeoutError()
		}
	}
}

func (j *job) timeoutError() error {
	if j.phase.CompareAndSwap(examining, abandoned) {
		return j.dev.errorf(volume.Timeout, "could not be looked at within %v; nothing was written: "+
			"does its storage hang? See the kernel's log", j.f.cfg.Timeout)
	}
	return j.dev.errorf(volume.Timeout, "mkfs.%s, e2fsck or resize2fs still runs after %v; it is left running, and the volume is "+
		"served when it has ended: if it never does, see the kernel's log for the storage behind the device", j.req.FSType, j.f.cfg.Timeout)
}

// ownMarks are the marks of the filesystems that are recognized by their superblock alone.
var ownMarks = map[string]mark{"ext2": extMark, "ext3": extMark, "ext4": extMark, "xfs": xfsMark, "btrfs": btrfsMark}

// checkGiven examines a device from a driver that defers by itself. The driver is responsible
// for the contents, but a sandbox could not mount a blank device or another filesystem. If the
// expected superblock is found, nothing else is read.
func (j *job) checkGiven(ctx context.Context) error {
	own, known := ownMarks[j.req.FSType]
	if known {
		if marked, err := j.hasMark(own); marked || err != nil {
			return err
		}
	}
	found, err := j.dev.examine(ctx, true)
	switch {
	case err != nil:
		return err
	case found.blank(j.f.cfg.AcceptLeftovers):
		return j.dev.errorf(unmet, "is blank, but a driver that defers by itself must hand over a device that holds %s: "+
			"check the driver's log; until the driver is fixed, exclude the volume by a policy rule", j.req.FSType)
	case !known:
		return nil
	}
	what := cmp.Or(found.signatures(), "no known signature")
	return j.dev.errorf(unmet, "holds %s, and not %s, which the driver that defers by itself (or crustctl publish) says: "+
		"correct the filesystem type that it says, or the device", what, j.req.FSType)
}

// hasMark reports whether the device has a mark. It opens the device without O_EXCL.
func (j *job) hasMark(m mark) (bool, error) {
	file, err := j.dev.open(unix.O_RDONLY | unix.O_DIRECT)
	if err != nil {
		return false, err
	}
	defer closeFile(file)
	size, err := file.Seek(0, io.SeekEnd)
	grain := grainOf(file)
	place := extent{start: m.at &^ (grain - 1), length: grain}
	if err != nil || size < place.start+grain {
		return false, nil //nolint:nilerr // examine will say what is wrong
	}
	data, err := place.read(file, superblock.Aligned(grain), size)
	if err != nil {
		return false, j.dev.errorf(volume.Internal, "cannot be read at byte %d: %w", place.start, err)
	}
	return m.within(data, place.start), nil
}
