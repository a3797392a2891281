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

	"github.com/crust-proxy/crust-proxy/internal/disk/superblock"
	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// cloner makes images from other images. If the filesystem can do that, the two share their
// data until one of them is written to; otherwise the data is copied, up to a limit.
type cloner struct {
	pool     *pool
	freezer  *freezer
	reflinks bool
	limit    int64
}

const noClones = "the filesystem of --data-dir has no reflinks and --copy-limit is 0: there are no clones and snapshots"

// hasReflinks reports whether files can share data. It tries, because that depends on how an xfs was made.
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

func (c *cloner) able() bool { return c.reflinks || c.limit > 0 }

type job struct {
	from, to        *record
	original, image *os.File
	// device is the loop device by which somebody may write to the original, or "".
	device string
}

func (j *job) open(in *pool) (err error) {
	if j.device, err = in.writable(j.from.ID); err != nil {
		return err
	}
	if j.original, err = in.openImage(j.from, os.O_RDONLY); err != nil {
		return err
	}
	// The first mount of a reader, too, writes what a log holds, unless it is of a frozen filesystem.
	if j.from.isOnlyRead() && (j.from.consistent() || !needsReplay(j.original)) {
		j.device = ""
	}
	j.image, err = os.OpenFile(in.image(j.to.ID), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	return err
}

func (j *job) close() (err error) {
	_ = j.original.Close() // nil has no effect
	if j.image != nil {
		err = j.image.Close()
	}
	return err
}

func (j *job) wrap(err error) error {
	if errors.Is(err, unix.ENOSPC) {
		return status.Errorf(codes.ResourceExhausted, "clone %q: the filesystem of %s is full", j.from.ID, filepath.Dir(j.original.Name()))
	}
	if err != nil {
		return fmt.Errorf("clone %q: %w", j.from.ID, err)
	}
	return nil
}

// provision makes a volume or a snapshot from the image of another record.
func (c *cloner) provision(ctx context.Context, from, to *record) error {
	needed, err := c.needs(from, to)
	if err != nil {
		return err
	}
	return c.pool.provision(to, needed, func() error { return c.fill(ctx, &job{from: from, to: to}) })
}

// needs returns how much room an image needs that is made from another one: what is copied, and what it is larger by.
func (c *cloner) needs(from, to *record) (int64, error) {
	needed := to.Capacity - from.Capacity
	if c.reflinks {
		return needed, nil
	}
	var stat unix.Stat_t
	if err := unix.Stat(c.pool.image(from.ID), &stat); err != nil && !errors.Is(err, unix.ENOENT) {
		return 0, err
	}
	return needed + stat.Blocks*512, nil // of a lost image, fill says that
}

// fill makes images from those of other records, all at one moment. The caller holds the locks of all records.
func (c *cloner) fill(ctx context.Context, jobs ...*job) (err error) {
	for _, j := range jobs {
		defer func() { err = errors.Join(err, j.close()) }()
		if err := j.open(c.pool); err != nil {
			return err
		}
		j.to.Sector = j.from.Sector
	}
	failpoint.Hit("driver-fill-begun")
	if err := c.capture(ctx, jobs); err != nil {
		return err
	}
	failpoint.Hit("driver-filled")
	for _, j := range jobs {
		if err := j.image.Sync(); err != nil {
			return j.wrap(err)
		}
	}
	return sys.SyncDir(c.pool.images)
}

// capture fills the images of jobs with the content that their originals have at one moment.
// Volumes in use are frozen for it; they must not have to be copied.
func (c *cloner) capture(ctx context.Context, jobs []*job) error {
	var busy []inUse
	for _, j := range jobs {
		if j.device == "" || j.from.AsFrozen { // the latter has readers only
			continue
		}
		if !c.reflinks {
			return status.Errorf(codes.FailedPrecondition, "volume %q is in use as %s and its data would have to be copied: unstage it first, "+
				"or put --data-dir on xfs or btrfs, where nothing is copied", j.from.ID, j.device)
		}
		busy = append(busy, inUse{id: j.from.ID, device: j.device})
	}
	free, err := c.freezer.hold(ctx, busy, func() error { return c.copyAll(ctx, jobs) })
	for _, j := range jobs {
		if err != nil {
			break
		}
		frozen := !slices.Contains(free, j.from.ID) && (j.device != "" || !needsReplay(j.image) && isClean(j.image))
		if is := frozen || j.from.consistent(); j.to.Snapshot != nil {
			j.to.Snapshot.Consistent = is
		} else {
			j.to.AsFrozen = is
		}
	}
	return err
}

// copyAll shares or copies the data of the originals.
func (c *cloner) copyAll(ctx context.Context, jobs []*job) (err error) {
	now := time.Now().UTC()
	for _, j := range jobs {
		j.to.Created = now
		if c.reflinks {
			err = reflink(j.image, j.original)
		} else {
			err = c.copy(ctx, j.from, j.image, j.original)
		}
		if err != nil {
			return j.wrap(err)
		}
	}
	return nil
}

// needsReplay reports whether the filesystem in an idle image is repaired at the next mount: its last user was killed.
func needsReplay(image *os.File) bool {
	return slices.ContainsFunc(fileSystems, func(fsType string) bool {
		dirty, err := superblock.NeedsReplay(image, fsType)
		return dirty || isUnread(err)
	})
}

// isClean reports whether an ext4 was unmounted, also if it has no journal, and has no errors on record.
func isClean(image *os.File) bool {
	super, err := superblock.Read(image, "ext4")
	return err == nil && super.Clean || err != nil && !isUnread(err)
}

// isUnread reports whether an error is none of another filesystem, or of no filesystem.
func isUnread(err error) bool {
	return err != nil && (!errors.Is(err, superblock.ErrNone) || errors.Is(err, superblock.ErrDamaged))
}

// copy copies the data of an image that nobody writes to, if it is not too much.
func (c *cloner) copy(ctx context.Context, from *record, image, original *os.File) error {
	var stat unix.Stat_t
	if err := unix.Fstat(int(original.Fd()), &stat); err != nil {
		return err
	}
	if bytes := stat.Blocks * 512; bytes > c.limit {
		return status.Errorf(codes.FailedPrecondition, "%q has %d bytes of data and at most %d are copied: raise --copy-limit, "+
			"or put --data-dir on xfs or btrfs, where nothing is copied", from.ID, bytes, c.limit)
	}
	began := time.Now()
	copied, err := copySparse(ctx, image, original, stat.Size)
	c.pool.log.Info("copied an image", zap.String("source", from.ID), zap.Int64("bytes", copied), zap.Duration("took", time.Since(began)), zap.Error(err))
	return err
}

// copyStep is how much is copied before the context is checked again.
const copyStep = 16 << 20

// copySparse copies the data of a file of this size and keeps its holes. It stops when the context ends.
func copySparse(ctx context.Context, to, from *os.File, size int64) (copied int64, err error) {
	if err := to.Truncate(size); err != nil {
		return 0, err
	}
	alive := func() error { return status.FromContextError(ctx.Err()).Err() }
	data := walk{to: size, alive: alive, report: func(at, end int64) error {
		for source, target := at, at; source < end; {
			if err := alive(); err != nil {
				return err
			}
			n, err := unix.CopyFileRange(int(from.Fd()), &source, int(to.Fd()), &target, int(min(end-source, copyStep)), 0)
			copied += int64(n)
			switch {
			case errors.Is(err, unix.EINTR):
			case err != nil:
				return err
			case n == 0:
				return io.ErrUnexpectedEOF
			}
		}
		return nil
	}}
	err = data.allocated(&regions{file: from, size: size})
	return copied, err
}
