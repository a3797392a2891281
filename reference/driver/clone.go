package driver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
)

// cloner makes images out of other images. Where the filesystem can, the two share their
// data until one of them is written to; elsewhere the data is copied, up to a limit.
type cloner struct {
	pool     *pool
	log      *zap.Logger
	freezer  *freezer
	reflinks bool
	limit    int64
}

const noClones = "the filesystem of --data-dir has no reflinks and --copy-limit is 0: there are no clones and snapshots"

func newCloner(disks *pool, freezes *freezer) (*cloner, error) {
	reflinks, err := hasReflinks(disks.images)
	return &cloner{pool: disks, log: disks.log, freezer: freezes, reflinks: reflinks, limit: disks.config.CopyLimit}, err
}

// hasReflinks tries it: whether an xfs has them depends on how it was made.
func hasReflinks(dir string) (bool, error) {
	var files [2]*os.File
	for i := range files {
		file, err := nameless(dir)
		if err != nil || file == nil { // a filesystem without such files has no reflinks either
			return false, err
		}
		defer func() { _ = file.Close() }()
		files[i] = file
	}
	if _, err := files[0].Write(make([]byte, sizeGrain)); err != nil {
		return false, err
	}
	return reflink(files[1], files[0]) == nil, nil
}

func reflink(to, from *os.File) error {
	return unix.IoctlFileClone(int(to.Fd()), int(from.Fd()))
}

// able tells whether there are clones at all.
func (c *cloner) able() bool { return c.reflinks || c.limit > 0 }

// fill makes the image of a record out of that of another one. The caller holds the locks
// of both.
func (c *cloner) fill(ctx context.Context, from, to *record) (err error) {
	original, err := c.pool.openImage(from, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer func() { _ = original.Close() }()
	image, err := os.OpenFile(c.pool.image(to.ID), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, image.Close()) }()
	failpoint.Hit("driver-fill-begun")
	if err = c.take(ctx, from, to, image, original); err == nil {
		failpoint.Hit("driver-filled")
		err = errors.Join(image.Sync(), syncDir(c.pool.images))
	}
	if errors.Is(err, unix.ENOSPC) {
		return status.Errorf(codes.ResourceExhausted, "clone %q: the filesystem of %s is full", from.ID, filepath.Dir(image.Name()))
	}
	if err != nil {
		return fmt.Errorf("clone %q: %w", from.ID, err)
	}
	return nil
}

// take takes the content of an image. By reflink it is that of one moment, also of a
// volume in use, whose filesystem is frozen for it.
func (c *cloner) take(ctx context.Context, from, to *record, image, original *os.File) error {
	device, err := c.pool.writable(from.ID)
	if err != nil {
		return err
	}
	content := func() error {
		to.Created = time.Now().UTC()
		if c.reflinks {
			return reflink(image, original)
		}
		return c.copy(ctx, from, image, original)
	}
	held := true
	switch {
	case device == "":
		err = content()
	case c.reflinks:
		held, err = c.freezer.hold(ctx, from.ID, device, content)
	default:
		err = status.Errorf(codes.FailedPrecondition, "volume %q is in use as %s and its data would have to be copied: unstage it first, "+
			"or put --data-dir on xfs or btrfs, where nothing is copied", from.ID, device)
	}
	if to.Snapshot != nil {
		to.Snapshot.Consistent = held
	}
	return err
}

// copy copies the data of an image that nobody writes to.
func (c *cloner) copy(ctx context.Context, from *record, image, original *os.File) error {
	var stat unix.Stat_t
	if err := unix.Fstat(int(original.Fd()), &stat); err != nil {
		return err
	}
	if bytes := stat.Blocks * 512; bytes > c.limit {
		return status.Errorf(codes.FailedPrecondition, "%q has %d bytes of data and at most %d are copied: raise --copy-limit, "+
			"or put --data-dir on xfs or btrfs, where nothing is copied", from.ID, bytes, c.limit)
	}
	began, shown := time.Now(), time.Now()
	copied, err := copySparse(ctx, image, original, func(copied int64) {
		if time.Since(shown) > progressEvery {
			shown = time.Now()
			c.log.Info("copying an image", zap.String("source", from.ID), zap.Int64("copied", copied), zap.Int64("of", stat.Blocks*512))
		}
	})
	c.log.Info("copied an image", zap.String("source", from.ID), zap.Int64("bytes", copied), zap.Duration("took", time.Since(began)), zap.Error(err))
	return err
}

const progressEvery = 5 * time.Second

// copyStep is how much is copied between two looks at whether the caller still waits.
const copyStep = 16 << 20

// copySparse copies what a file has and leaves its holes holes, until the context ends.
func copySparse(ctx context.Context, to, from *os.File, progress func(copied int64)) (copied int64, err error) {
	size, err := from.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, err
	}
	if err := to.Truncate(size); err != nil {
		return 0, err
	}
	for at := int64(0); ; {
		data, err := unix.Seek(int(from.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // only a hole is left
			return copied, nil
		}
		if err != nil {
			return copied, err
		}
		if at, err = unix.Seek(int(from.Fd()), data, unix.SEEK_HOLE); err != nil {
			return copied, err
		}
		for source, target := data, data; source < at; progress(copied) {
			if ctx.Err() != nil {
				return copied, status.FromContextError(ctx.Err()).Err()
			}
			n, err := unix.CopyFileRange(int(from.Fd()), &source, int(to.Fd()), &target, int(min(at-source, copyStep)), 0)
			copied += int64(n)
			switch {
			case errors.Is(err, unix.EINTR):
			case err != nil:
				return copied, err
			case n == 0:
				return copied, io.ErrUnexpectedEOF
			}
		}
	}
}
