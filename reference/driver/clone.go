package driver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/superblock"
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
	reflinks, err := hasReflinks(disks.config.DataDir)
	return &cloner{pool: disks, log: disks.log, freezer: freezes, reflinks: reflinks, limit: disks.config.CopyLimit}, err
}

// hasReflinks tries it: whether an xfs has them depends on how it was made.
func hasReflinks(dir string) (bool, error) {
	empty, err := openProbe(dir)
	if err != nil {
		return false, err
	}
	defer func() { _ = empty.Close() }()
	return reflink(empty, empty) == nil, nil
}

func reflink(to, from *os.File) error {
	return unix.IoctlFileClone(int(to.Fd()), int(from.Fd()))
}

// able tells whether there are clones at all.
func (c *cloner) able() bool { return c.reflinks || c.limit > 0 }

// job is the making of one image out of that of another record.
type job struct {
	from, to        *record
	original, image *os.File
	// device is that by which the original may be written to, or "".
	device string
}

func (j *job) open(in *pool) (err error) {
	if j.device, err = in.writable(j.from.ID); err != nil {
		return err
	}
	if j.original, err = in.openImage(j.from, os.O_RDONLY); err != nil {
		return err
	}
	j.image, err = os.OpenFile(in.image(j.to.ID), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	return err
}

func (j *job) close() (err error) {
	if j.original != nil {
		_ = j.original.Close()
	}
	if j.image != nil {
		err = j.image.Close()
	}
	return err
}

// failed names the source in an error.
func (j *job) failed(err error) error {
	if errors.Is(err, unix.ENOSPC) {
		return status.Errorf(codes.ResourceExhausted, "clone %q: the filesystem of %s is full", j.from.ID, filepath.Dir(j.original.Name()))
	}
	if err != nil {
		return fmt.Errorf("clone %q: %w", j.from.ID, err)
	}
	return nil
}

// fill makes the images of records out of those of others, all of one moment. The caller
// holds the locks of all of them.
func (c *cloner) fill(ctx context.Context, jobs ...*job) (err error) {
	for _, j := range jobs {
		defer func() { err = errors.Join(err, j.close()) }()
		if err := j.open(c.pool); err != nil {
			return err
		}
	}
	failpoint.Hit("driver-fill-begun")
	if err := c.take(ctx, jobs); err != nil {
		return err
	}
	failpoint.Hit("driver-filled")
	for _, j := range jobs {
		if err := j.image.Sync(); err != nil {
			return j.failed(err)
		}
	}
	return syncDir(c.pool.images)
}

// take takes the content of images. By reflink it is that of one moment, also of volumes in
// use, whose filesystems are frozen for it.
func (c *cloner) take(ctx context.Context, jobs []*job) error {
	var busy []inUse
	for _, j := range jobs {
		if j.device == "" {
			continue
		}
		if !c.reflinks {
			return status.Errorf(codes.FailedPrecondition, "volume %q is in use as %s and its data would have to be copied: unstage it first, "+
				"or put --data-dir on xfs or btrfs, where nothing is copied", j.from.ID, j.device)
		}
		busy = append(busy, inUse{id: j.from.ID, device: j.device})
	}
	free, err := c.freezer.hold(ctx, busy, func() error { return c.content(ctx, jobs) })
	for _, j := range jobs {
		if s := j.to.Snapshot; s != nil && err == nil {
			s.Consistent = !slices.Contains(free, j.from.ID) && (j.device != "" || !needsReplay(j.image))
		}
	}
	return err
}

func (c *cloner) content(ctx context.Context, jobs []*job) (err error) {
	now := time.Now().UTC()
	for _, j := range jobs {
		j.to.Created = now
		if c.reflinks {
			err = reflink(j.image, j.original)
		} else {
			err = c.copy(ctx, j.from, j.image, j.original)
		}
		if err != nil {
			return j.failed(err)
		}
	}
	return nil
}

// needsReplay tells whether an image that nobody uses is as after a crash: its last user was
// killed.
func needsReplay(image *os.File) bool {
	return slices.ContainsFunc(fileSystems, func(fsType string) bool {
		dirty, err := superblock.NeedsReplay(image, fsType)
		return err == nil && dirty // else it is another filesystem, or none
	})
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
