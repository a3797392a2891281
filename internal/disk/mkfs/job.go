package mkfs

import (
	"context"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// The phases of a job. A caller who goes away ends it while it looks; once it
// makes a filesystem nobody does.
const (
	looking int32 = iota
	making
	abandoned
)

// tries is how often a device is looked at anew that was taken in between.
const tries = 4

// job is one Prepare.
type job struct {
	f     *Formatter
	req   Request
	dev   *device
	phase atomic.Int32
}

// start runs the work under the device's lock, so that no second job hangs beside one that
// does, and waits for it as wait does.
func (j *job) start(ctx context.Context, work func(context.Context) (formatted bool, err error)) (formatted bool, err error) {
	if err := j.check(); err != nil {
		return false, err
	}
	if err := j.dev.keep(); err != nil {
		j.dev.close()
		return false, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan outcome, 1)
	go func() {
		formatted, err := false, j.dev.takeLock(ctx)
		if err == nil {
			formatted, err = work(ctx)
		}
		j.dev.close()
		done <- outcome{formatted, err}
	}()
	return j.wait(ctx, done)
}

func (j *job) check() error {
	switch j.req.Policy {
	case volume.FormatHost, volume.FormatNever, volume.FormatDriver:
	default:
		return j.dev.errorf(volume.Invalid, "unknown format policy %q: host or never", clip(string(j.req.Policy)))
	}
	if !nameForm().MatchString(j.req.FSType) {
		return j.dev.errorf(volume.Invalid, "%q is no filesystem type", clip(j.req.FSType))
	}
	return nil
}

func (j *job) run(ctx context.Context) (formatted bool, err error) {
	for try := 1; ; try++ {
		formatted, err = j.once(ctx)
		if err == nil || volume.KindOf(err) != volume.Busy || try == tries {
			return formatted, err
		}
		if !sys.Sleep(ctx, pollEvery) {
			return false, err
		}
	}
}

// once looks and, where it is right, formats. A device that was taken for a
// moment between the two is worth another look.
func (j *job) once(ctx context.Context) (formatted bool, err error) {
	if j.req.Policy == volume.FormatDriver {
		if err := j.checkGiven(ctx); err != nil {
			return false, err
		}
		return false, (&growth{j: j}).run(ctx)
	}
	found, err := j.dev.look(ctx, false)
	if err != nil {
		return false, err
	}
	if err := j.judge(found); err != nil {
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
			"over as it is, and its root directory may lack its mode", zap.String("volume", j.req.Volume), zap.String("device", j.req.Path))
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
// on to its end.
func (j *job) beginMaking(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return j.dev.gone(err)
	}
	if j.phase.Load() != making && !j.phase.CompareAndSwap(looking, making) {
		return j.dev.errorf(volume.Canceled, "the caller went away; nothing was written")
	}
	return j.dev.lockWriting()
}

// judge refuses everything but fsType, and a blank device that may be formatted.
func (j *job) judge(found *contents) error {
	switch {
	case found.is(j.req.FSType) && found.unfinished: // an mkfs was killed
		return j.dev.errorf(unmet, "holds a %s whose making or copying was cut off: restore it, or, if nothing on it is "+
			"wanted, wipe it (wipefs -a, blkdiscard or dd) and publish again", j.req.FSType)
	case found.is(j.req.FSType):
		return j.judgeMode(found)
	case !found.blank(j.f.cfg.AcceptLeftovers):
		return j.foreign(found)
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

// judgeMode refuses a filesystem that lacks the mode of its root directory, where that
// is not to be set.
func (j *job) judgeMode(found *contents) error {
	if !found.lacksMode || j.req.Policy == volume.FormatHost && !j.req.ReadOnly && !found.writeProtected {
		return nil
	}
	return j.dev.errorf(unmet, "holds an ext4 whose making was interrupted: its root directory lacks its mode. "+
		"Publish the volume read-write once, with the format policy host")
}

func (j *job) foreign(found *contents) error {
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

// wait waits for the job. A device can hang whoever touches it, unkillably, so
// the caller is freed, while the job keeps its own descriptors and the lock.
func (j *job) wait(ctx context.Context, done <-chan outcome) (bool, error) {
	bound := time.NewTimer(j.f.cfg.Timeout)
	defer bound.Stop()
	gone := ctx.Done()
	for {
		select {
		case out := <-done:
			return out.formatted, out.err
		case <-gone:
			if j.phase.CompareAndSwap(looking, abandoned) {
				return false, j.dev.gone(ctx.Err())
			}
			gone = nil
		case <-bound.C:
			return false, j.late()
		}
	}
}

func (j *job) late() error {
	if j.phase.CompareAndSwap(looking, abandoned) {
		return j.dev.errorf(volume.Timeout, "could not be looked at within %v; nothing was written: "+
			"does its storage hang? See the kernel's log", j.f.cfg.Timeout)
	}
	return j.dev.errorf(volume.Timeout, "mkfs.%s, e2fsck or resize2fs still runs after %v; it is left running, and the volume is "+
		"served when it has ended: if it never does, see the kernel's log for the storage behind the device", j.req.FSType, j.f.cfg.Timeout)
}
