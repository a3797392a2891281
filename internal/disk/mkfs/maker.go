package mkfs

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/google/uuid"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/disk/confine"
	"github.com/crust-proxy/crust-proxy/internal/disk/superblock"
	"github.com/crust-proxy/crust-proxy/internal/ground/capture"
	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// make runs mkfs, and checks that the filesystem exists, is the new one, and has reached the device.
func (j *job) make(ctx context.Context, mkfs program, args arguments) (bool, error) {
	// Opened before the first write: fsync of this descriptor reports all later failures of
	// writeback, even if mkfs does not call it.
	witness, err := j.dev.open(unix.O_RDONLY)
	if err != nil {
		return false, err
	}
	defer closeFile(witness)
	id := uuid.NewString()
	log := j.f.cfg.Log.With(zap.String("target", j.req.Volume), zap.String("device", j.req.Path), zap.String("fs_type", j.req.FSType))
	log.Info("the device is blank: making a filesystem")
	began := time.Now()
	if err := j.mkfs(ctx, mkfs, args, id, witness); err != nil {
		err = j.clearFailed(ctx, id, err)
		log.Warn("no filesystem was made", zap.Duration("duration", time.Since(began)), zap.Error(err))
		return false, err
	}
	log.Info("made a filesystem", zap.Duration("duration", time.Since(began)))
	return true, nil
}

func (j *job) mkfs(ctx context.Context, mkfs program, arguments arguments, uuid string, witness *os.File) error {
	withMode := j.req.FSType == "ext4" && j.req.Root.Mode != 0
	if withMode {
		if err := j.dev.intent.begin(workMaking, uuid); err != nil {
			return j.dev.errorf(volume.Internal, "cannot be formatted: %w", err)
		}
	}
	ran, err := j.runMkfs(ctx, mkfs, arguments, uuid)
	if err != nil {
		return err
	}
	if withMode {
		if err := j.setRootMode(ctx); err != nil {
			return err
		}
	}
	if err := j.sync(witness); err != nil {
		return err
	}
	found, err := j.dev.examine(ctx, false)
	if err != nil {
		return fmt.Errorf("after mkfs.%s: %w", j.req.FSType, err)
	}
	if !found.is(j.req.FSType) || found.unfinished || found.labelled() || found.probe.tags["UUID"] != uuid {
		return j.dev.errorf(volume.Internal, "mkfs.%s ended well, and yet the device does not hold what it made "+
			"(found: %s): %s", j.req.FSType, cmp.Or(found.signatures(), "nothing known"), ran.text())
	}
	return j.endIntent()
}

func (j *job) runMkfs(ctx context.Context, mkfs program, arguments arguments, uuid string) (*result, error) {
	files := []*os.File{j.dev.file, j.dev.lock}
	args, prototype := arguments(uuid, j.req.Options, j.req.Root)
	if prototype != "" {
		file, err := capture.Holding(prototype)
		if err != nil {
			return nil, j.dev.errorf(volume.Internal, "cannot be formatted: %w", err)
		}
		defer closeFile(file)
		files = append(files, file)
	}
	ran, err := mkfs.run(ctx, confine.Box{Device: j.dev.file}, files, append(args, childDevice)...)
	if err != nil {
		return nil, j.dev.errorf(volume.Internal, "mkfs.%s could not be run: %w", j.req.FSType, err)
	}
	failpoint.Hit("format-after-mkfs")
	isBusy := func(says string) bool { return ran.Code > 0 && strings.Contains(ran.Stderr, says) }
	switch {
	case !ran.failed():
		return ran, nil
	case isBusy("Device or resource busy") || isBusy("apparently in use by the system"): // only a hint: the device is examined again
		return nil, j.dev.errorf(volume.Busy, "was opened by another program before mkfs.%s could open it (%s): "+
			"repeat the call", j.req.FSType, ran.text())
	default:
		return nil, j.dev.errorf(volume.Internal, "mkfs.%s failed (%s): %s", j.req.FSType, ran.how(), ran.text())
	}
}

// endIntent removes the intent: what was begun on the filesystem is complete.
func (j *job) endIntent() error {
	if err := j.dev.intent.end(); err != nil {
		return j.dev.errorf(volume.Internal, "%w", err)
	}
	return nil
}

func (j *job) sync(witness *os.File) error {
	err := witness.Sync()
	if err == nil {
		return nil
	}
	return j.dev.errorf(volume.DiskKind(err), "mkfs.%s ended well, but its writes did not reach the device "+
		"(is the storage behind it full?): %w", j.req.FSType, err)
}

// clearFailed makes a device blank again after mkfs failed, so that its remains are not used, and the next attempt can
// start again. It clears only if the device has the UUID of this mkfs, or no signature, as before. Any other filesystem
// stays, and everything if mkfs could not open the device.
func (j *job) clearFailed(ctx context.Context, uuid string, cause error) error {
	if volume.KindOf(cause) == volume.Busy {
		return cause
	}
	found, err := j.dev.examine(ctx, false)
	if err != nil || !found.leftBy(uuid) {
		return cause
	}
	if err := j.clear(ctx, uuid); err != nil {
		return volume.Errorf(volume.KindOf(cause), "%w; what mkfs left on it could not be cleared (%w): "+
			"wipe it before the volume is used", cause, err)
	}
	return errors.Join(cause, j.endIntent())
}

func (c *contents) leftBy(uuid string) bool {
	return c.probe.nothing() || !c.probe.ambivalent && c.probe.tags["UUID"] == uuid
}

// clear writes zeros over the parts that were blank before mkfs.
func (j *job) clear(ctx context.Context, uuid string) error {
	file, err := j.dev.openAlone(ctx, unix.O_RDWR)
	if err != nil {
		return err
	}
	defer sys.CloseFileAlone(file)
	// Again, now that nobody else can come in between.
	now := &contents{}
	if now.probe, err = j.dev.blkid(ctx); err != nil {
		return err
	}
	if !now.leftBy(uuid) {
		return j.dev.errorf(unmet, "it has changed meanwhile")
	}
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	buffer := superblock.Aligned(window)
	for _, e := range windows(size, grainOf(file)) {
		if err := clearExtent(file, e, buffer, size); err != nil {
			return err
		}
	}
	return file.Sync()
}

// clearExtent writes only over bytes that are not zero: on a thin device that is full, zeros need space too.
func clearExtent(file *os.File, e extent, buffer []byte, size int64) error {
	data, err := e.read(file, buffer, size)
	if err != nil {
		return err
	}
	grain := grainOf(file)
	for at := int64(0); at < int64(len(data)); at += grain {
		piece := data[at:min(at+grain, int64(len(data)))]
		if len(bytes.TrimLeft(piece, "\x00")) == 0 {
			continue
		}
		clear(piece)
		if _, err := file.WriteAt(piece, e.start+at); err != nil {
			return err
		}
	}
	return nil
}

// complete sets the mode of the root directory after an earlier attempt was interrupted.
func (j *job) complete(ctx context.Context) error {
	witness, err := j.dev.open(unix.O_RDONLY) // see make
	if err != nil {
		return err
	}
	defer closeFile(witness)
	if err := j.setRootMode(ctx); err != nil {
		return err
	}
	j.f.cfg.Log.Info("completed a filesystem whose making was interrupted", zap.String("target", j.req.Volume), zap.String("device", j.req.Path))
	if err := j.sync(witness); err != nil {
		return err
	}
	return j.endIntent()
}

// setRootMode sets the mode of the root directory of a new ext4, which mkfs cannot before e2fsprogs
// 1.47.1, and removes labelNoMode. libext2fs writes and syncs everything else before the
// superblock, which has the label. btrfs would have to be mounted.
func (j *job) setRootMode(ctx context.Context) error {
	program, err := j.f.tool("debugfs")
	if err != nil {
		return j.dev.errorf(volume.KindOf(err), "the mode of its root directory cannot be set: %w", err)
	}
	const directory = 0o40000
	commands := "set_super_value volume_name \"\"\n"
	if j.req.Root.Mode != 0 { // else the rule has changed since
		commands += fmt.Sprintf("set_inode_field <2> mode 0%o\n", directory|j.req.Root.Mode)
	}
	file, err := capture.Holding(commands)
	if err != nil {
		return j.dev.errorf(volume.Internal, "the mode of its root directory cannot be set: %w", err)
	}
	defer closeFile(file)
	ctx, cancel := context.WithTimeout(ctx, j.f.cfg.Timeout/2)
	defer cancel()
	ran, err := program.run(ctx, j.dev.box(), []*os.File{j.dev.file, j.dev.lock, file}, "-w", "-f", childPrototype, childDevice)
	if err != nil {
		return j.dev.errorf(volume.Internal, "debugfs could not be run: %w", err)
	}
	// It always prints its version, and exits with 0 in spite of errors.
	said := strings.TrimSpace(ran.Stderr)
	if ran.failed() || strings.Contains(said, "\n") || !strings.HasPrefix(said, "debugfs ") {
		return j.dev.errorf(volume.Internal, "debugfs could not set the mode of its root directory (%s): %s", ran.how(), ran.text())
	}
	return nil
}
