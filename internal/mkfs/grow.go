package mkfs

import (
	"context"
	"io"
	"os"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/superblock"
)

// leastGrowth is how much larger than its filesystem a device has to be. mkfs.ext4
// leaves out the end of a device where it is too small for a block group.
const leastGrowth = 16 * mib

// grow grows an ext4 that is smaller than its device, as one is that was restored or
// cloned into a larger volume. Whatever goes wrong keeps no pod waiting: the sandbox
// gets the filesystem as it is, and the log says why it is small.
//
// Programs of this node parse the volume's filesystem here, which somebody else wrote.
// The check is ended when it takes too long; resize2fs is not: a filesystem whose growth
// was cut off may be lost.
func (j *job) grow(ctx context.Context) {
	if !j.req.Grow || j.req.ReadOnly || j.req.FSType != "ext4" {
		return
	}
	has, wants, err := j.sizes(ctx)
	if err != nil || wants-has < leastGrowth || !j.phase.CompareAndSwap(looking, making) {
		return
	}
	log := j.f.cfg.Log.With(zap.String("volume", j.req.Volume), zap.String("device", j.req.Path), zap.Int64("filesystem", has), zap.Int64("size", wants))
	began := time.Now()
	if why := j.resize(context.WithoutCancel(ctx)); why != "" {
		log.Warn("the filesystem is smaller than its device and could not be grown: the sandbox gets it as it is", zap.String("reason", why))
		return
	}
	log.Info("grew a filesystem to the size of its device", zap.Duration("took", time.Since(began)))
}

func (j *job) sizes(ctx context.Context) (has, wants int64, err error) {
	file, err := j.dev.openAlone(ctx, unix.O_RDONLY)
	if err != nil {
		return 0, 0, err
	}
	defer closeAlone(file)
	super, err := superblock.Read(file, j.req.FSType)
	if err != nil {
		return 0, 0, err
	}
	wants, err = file.Seek(0, io.SeekEnd)
	return super.Bytes, wants, err
}

// resize says why it did not grow the filesystem, or nothing.
func (j *job) resize(ctx context.Context) (why string) {
	check, err := j.f.tool("e2fsck")
	if err != nil {
		return err.Error()
	}
	resize, err := j.f.tool("resize2fs")
	if err != nil {
		return err.Error()
	}
	files := []*os.File{j.dev.file, j.dev.lock}
	bounded, cancel := context.WithTimeout(ctx, j.f.cfg.Timeout/2)
	defer cancel()
	ran, err := check.run(bounded, files, "-f", "-p", childDevice)
	const repaired = 1
	switch {
	case bounded.Err() != nil:
		return "e2fsck took longer than " + (j.f.cfg.Timeout / 2).String() + " and was ended"
	case err != nil:
		return "e2fsck could not be run: " + err.Error()
	case ran.signal != 0 || ran.code > repaired:
		return "e2fsck found errors that it does not repair by itself (" + ran.how() + "): " + ran.text()
	}
	failpoint.Hit("format-before-resize")
	ran, err = resize.run(ctx, files, childDevice)
	switch {
	case err != nil:
		return "resize2fs could not be run: " + err.Error()
	case ran.failed():
		return "resize2fs failed (" + ran.how() + "): " + ran.text()
	}
	return ""
}
