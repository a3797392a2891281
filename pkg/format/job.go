package format

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
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
	f                    *Formatter
	volume, path, fsType string
	policy               deferral.FormatPolicy
	readOnly             bool

	phase  atomic.Int32
	device *os.File // O_PATH, a duplicate of the caller's
	lock   *os.File
	number uint64 // what the device is
}

func (j *job) errorf(kind deferral.Kind, format string, args ...any) error {
	return deferral.Errorf(kind, "volume %s: the device %s: %w", j.volume, j.path, fmt.Errorf(format, args...))
}

// gone classes the end of the caller's context.
func (j *job) gone(cause error) error {
	kind := deferral.Canceled
	if errors.Is(cause, context.DeadlineExceeded) {
		kind = deferral.Timeout
	}
	return j.errorf(kind, "the caller went away before it was looked at; nothing was written: %w", cause)
}

func (j *job) check() error {
	switch j.policy {
	case deferral.FormatHost, deferral.FormatGuest, deferral.FormatNever:
	default:
		return j.errorf(deferral.Invalid, "unknown format policy %q: host, guest or never", clip(string(j.policy)))
	}
	if !plainName(j.fsType) {
		return j.errorf(deferral.Invalid, "%q is no filesystem type", clip(j.fsType))
	}
	return nil
}

// keep makes the descriptor our own: a job can outlive its caller.
func (j *job) keep(device int) error {
	fd, err := unix.FcntlInt(uintptr(device), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return j.errorf(deferral.Internal, "its descriptor cannot be kept: %w", err)
	}
	j.device = os.NewFile(uintptr(fd), "device")
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		j.close()
		return j.errorf(deferral.Internal, "cannot be looked at: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		j.close()
		return j.errorf(deferral.Invalid, "is no block device")
	}
	j.number = st.Rdev
	return nil
}

func (j *job) close() {
	closeFile(j.device)
	closeFile(j.lock)
}

func (j *job) run(ctx context.Context) (formatted bool, err error) {
	if err := j.takeLock(ctx); err != nil {
		return false, err
	}
	for try := 1; ; try++ {
		formatted, err = j.once(ctx)
		if err == nil || deferral.KindOf(err) != deferral.Busy || try == tries {
			return formatted, err
		}
		if gone := pause(ctx); gone != nil {
			return false, err
		}
	}
}

// once looks and, where it is right, formats. A device that was taken for a
// moment between the two is worth another look.
func (j *job) once(ctx context.Context) (formatted bool, err error) {
	found, err := j.look(ctx)
	if err != nil {
		return false, err
	}
	if err := j.judge(found); err != nil {
		return false, err
	}
	if !found.blank(j.f.leftovers) || j.policy == deferral.FormatGuest {
		return false, nil
	}
	mk, err := j.f.maker(j.fsType)
	if err != nil {
		return false, j.errorf(deferral.KindOf(err), "is blank, and %w", err)
	}
	if err := ctx.Err(); err != nil {
		return false, j.gone(err)
	}
	if j.phase.Load() != making && !j.phase.CompareAndSwap(looking, making) {
		return false, j.errorf(deferral.Canceled, "the caller went away; nothing was written")
	}
	failpoint.Hit("format-before-mkfs")
	return j.make(context.WithoutCancel(ctx), mk)
}

// judge refuses everything but fsType, and a blank device that may be left blank
// or formatted.
func (j *job) judge(found *contents) error {
	switch {
	case found.is(j.fsType):
		return j.whole(found)
	case !found.blank(j.f.leftovers):
		return j.foreign(found)
	case j.policy == deferral.FormatGuest && !j.readOnly:
		return nil
	case j.readOnly:
		return j.errorf(unmet, "is blank, and the volume is read-only, so it is not formatted: "+
			"publish the volume read-write once, or make %s on it", j.fsType)
	case j.policy == deferral.FormatNever:
		return j.errorf(unmet, "is blank, and the format policy is never: make %s on it, or set the policy "+
			"to host or guest", j.fsType)
	case found.writeProtected:
		return j.errorf(unmet, "is blank and write-protected, so it cannot be formatted: "+
			"attach it read-write, or make %s on it elsewhere", j.fsType)
	default:
		return nil
	}
}

// whole refuses what an mkfs that was killed has left.
func (j *job) whole(found *contents) error {
	if !found.unfinished {
		return nil
	}
	return j.errorf(unmet, "holds a %s whose making or copying was cut off: restore it, or, if nothing on it is "+
		"wanted, wipe it (wipefs -a, blkdiscard or dd) and publish again", j.fsType)
}

func (j *job) foreign(found *contents) error {
	const wipe = "if nothing on it is wanted, wipe it (wipefs -a, then blkdiscard or dd over its first and last MiB) and publish again"
	if what := found.signatures(); what != "" {
		return j.errorf(unmet, "holds %s where %s is wanted. It is not formatted: correct the volume's filesystem type "+
			"or the device; %s", what, j.fsType, wipe)
	}
	return j.errorf(unmet, "holds no known signature, but is not blank either: there is data at byte %d. "+
		"It is not formatted: find out what that is; %s", found.dataAt, wipe)
}

// make runs mkfs and looks whether the filesystem is there, is the one just
// made, and has reached the device.
func (j *job) make(ctx context.Context, m *maker) (bool, error) {
	// Opened before the first write: whatever the kernel fails to write back from
	// here on is told by this descriptor's fsync, even if mkfs does not ask.
	witness, err := j.open(unix.O_RDONLY)
	if err != nil {
		return false, err
	}
	defer closeFile(witness)
	uuid, err := newUUID()
	if err != nil {
		return false, j.errorf(deferral.Internal, "cannot be formatted: %w", err)
	}
	log := j.f.log.With(zap.String("volume", j.volume), zap.String("device", j.path), zap.String("fsType", j.fsType))
	log.Info("the device is blank: making a filesystem")
	began := time.Now()
	err = j.mkfs(ctx, m, uuid, witness)
	if err != nil {
		err = j.takeBack(ctx, uuid, err)
		log.Warn("no filesystem was made", zap.Duration("took", time.Since(began)), zap.Error(err))
		return false, err
	}
	log.Info("made a filesystem", zap.Duration("took", time.Since(began)))
	return true, nil
}

func (j *job) mkfs(ctx context.Context, m *maker, uuid string, witness *os.File) error {
	ran, err := m.program.run(ctx, j.device, j.lock, append(m.args(uuid), childDevice)...)
	if err != nil {
		return j.errorf(deferral.Internal, "mkfs.%s could not be run: %w", j.fsType, err)
	}
	failpoint.Hit("format-after-mkfs")
	if ran.refusedBusy() {
		return j.errorf(deferral.Busy, "was taken by another program before mkfs.%s could have it (%s): "+
			"the call is to be repeated", j.fsType, ran.text())
	}
	if ran.failed() {
		return j.errorf(deferral.Internal, "mkfs.%s failed (%s): %s", j.fsType, ran.how(), ran.text())
	}
	if err := witness.Sync(); err != nil {
		kind := deferral.Internal
		if errors.Is(err, unix.ENOSPC) {
			kind = deferral.Exhausted
		}
		return j.errorf(kind, "mkfs.%s ended well, but its writes did not reach the device "+
			"(is the storage behind it full?): %w", j.fsType, err)
	}
	found, err := j.look(ctx)
	if err != nil {
		return fmt.Errorf("after mkfs.%s: %w", j.fsType, err)
	}
	if !found.is(j.fsType) || found.unfinished || found.probe.tags["UUID"] != uuid {
		return j.errorf(deferral.Internal, "mkfs.%s ended well, and yet the device does not hold what it made "+
			"(found: %s): %s", j.fsType, orNothing(found.signatures()), ran.text())
	}
	return nil
}
