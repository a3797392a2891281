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
	super, size, err := j.sizes(ctx)
	if err != nil || super.Bytes > size || super.Fills(size) || j.beginMaking(ctx) != nil {
		return
	}
	log := j.f.cfg.Log.With(zap.String("volume", j.req.Volume), zap.String("device", j.req.Path), zap.Int64("filesystem", super.Bytes), zap.Int64("size", size))
	began := time.Now()
	if why := j.resize(context.WithoutCancel(ctx)); why != "" {
		log.Warn("the filesystem is smaller than its device and could not be grown: the sandbox gets it as it is", zap.String("reason", why))
		return
	}
	log.Info("grew a filesystem to the size of its device", zap.Duration("took", time.Since(began)))
}

func (j *job) sizes(ctx context.Context) (super *superblock.Super, device int64, err error) {
	file, err := j.dev.openAlone(ctx, unix.O_RDONLY)
	if err != nil {
		return nil, 0, err
	}
	defer closeAlone(file)
	super, err = superblock.Read(file, j.req.FSType)
	if err != nil {
		return nil, 0, err
	}
	device, err = file.Seek(0, io.SeekEnd)
	return super, device, err
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
