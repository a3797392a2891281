package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
)

// pool keeps the volumes: their records, their images and the loop devices over them.
type pool struct {
	config Config
	log    *zap.Logger
	store  store
	images string
	// sectorSize is that of all loop devices, 0 leaves it to the kernel.
	sectorSize uint32
	// provisioning keeps the sum of what is promised while it is added to.
	provisioning sync.Mutex
}

func openPool(config Config) (*pool, error) {
	l := &pool{
		config: config, log: config.Log,
		store: store{dir: filepath.Join(config.DataDir, "volumes")}, images: filepath.Join(config.DataDir, "images"),
	}
	for _, dir := range []string{config.DataDir, l.store.dir, l.images} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("make the data directory: %w", err)
		}
	}
	var err error
	if l.store.spare, err = openSpare(filepath.Join(config.DataDir, "spare")); err != nil {
		return nil, err
	}
	l.sectorSize, err = sectorSize(config.DataDir)
	return l, err
}

// sectorSize gives the sectors of loop devices: the smallest with which a new image allows
// direct I/O, always the same, as the filesystem on a volume may not be mounted with others.
// Left to the kernel they change with direct I/O, and with a clone: on xfs an image that
// shares data needs sectors of a whole block. Such a volume goes without direct I/O.
func sectorSize(dir string) (uint32, error) {
	empty, err := openProbe(dir)
	if err != nil {
		return 0, err
	}
	defer func() { _ = empty.Close() }()
	var stat unix.Statx_t
	if err := unix.Statx(int(empty.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &stat); err != nil {
		return 0, err
	}
	if stat.Dio_offset_align > largestSector {
		return 0, nil
	}
	return stat.Dio_offset_align, nil
}

const largestSector = 4096

// openProbe opens a file that stays empty, by which the filesystem shows what it can. It is
// there after the first start: on a full disk, from which something has to be removed, there
// is no room for a new one.
func openProbe(dir string) (*os.File, error) {
	return os.OpenFile(filepath.Join(dir, "probe"), os.O_RDWR|os.O_CREATE, 0o600) //nolint:gosec // in a directory of ours
}

func (l *pool) image(id string) string { return filepath.Join(l.images, fileName(id)+".img") }

func (l *pool) openImage(r *record, flags int) (*os.File, error) {
	file, err := os.OpenFile(l.image(r.ID), flags, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, status.Errorf(codes.DataLoss, "%q: its image is gone", r.ID)
	}
	return file, err
}

// makeImage makes the image, or lets it grow to the capacity; it never shrinks.
func (l *pool) makeImage(r *record) (err error) {
	flags := os.O_RDWR
	if !r.Ready {
		flags |= os.O_CREATE // an image that was there and is gone is a loss, not a start
	}
	file, err := l.openImage(r, flags)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if info.Size() >= r.Capacity {
		return nil
	}
	err = file.Truncate(r.Capacity)
	if errors.Is(err, unix.EFBIG) {
		return status.Errorf(codes.OutOfRange, "volume %q: the filesystem of --data-dir has no files of %d bytes", r.ID, r.Capacity)
	}
	if err != nil {
		return fmt.Errorf("volume %q: give its image %d bytes: %w", r.ID, r.Capacity, err)
	}
	return errors.Join(file.Sync(), syncDir(l.images))
}

// attached finds the volume's loop devices.
func (l *pool) attached(id string) ([]loopdev.Attached, error) {
	info, err := os.Stat(l.image(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return loopdev.Over(info)
}

// writable gives the loop device by which the volume may be written to, if there is one.
func (l *pool) writable(id string) (path string, err error) {
	found, err := l.attached(id)
	for _, one := range found {
		if !one.ReadOnly {
			path = one.Path
		}
	}
	return path, err
}

// leavingTries and leavingPause bound the wait for a device that goes away when
// its last user, say a probe of udev's, has closed it.
const (
	leavingTries = 20
	leavingPause = 50 * time.Millisecond
)

// settled lists the volume's loop devices as attached does, after a wait for those that are
// going away.
func (l *pool) settled(id string) (found []loopdev.Attached, leaving bool, err error) {
	for range leavingTries {
		found, err = l.attached(id)
		leaving = slices.ContainsFunc(found, func(one loopdev.Attached) bool { return one.Leaving })
		if err != nil || !leaving {
			break
		}
		time.Sleep(leavingPause)
	}
	return found, leaving, err
}

// attach gives the volume's loop device, and makes it where there is none.
func (l *pool) attach(r *record, readOnly bool) (string, error) {
	found, leaving, err := l.settled(r.ID)
	if err != nil {
		return "", err
	}
	for _, one := range found {
		if !one.Leaving && one.ReadOnly == readOnly {
			return one.Path, nil
		}
	}
	if leaving {
		return "", status.Errorf(codes.Aborted, "volume %q: another program still uses the loop device of its last use", r.ID)
	}
	path, err := loopdev.Attach(l.image(r.ID), loopdev.Options{ReadOnly: readOnly, DirectIO: !r.Buffered, SectorSize: l.sectorSize})
	failpoint.Hit("driver-attached")
	return path, err
}

// detach frees the volume's loop devices, or only the read-only ones.
func (l *pool) detach(id string, onlyReadOnly bool) error {
	found, err := l.attached(id)
	if err != nil {
		return err
	}
	for _, one := range found {
		if one.Leaving || onlyReadOnly && !one.ReadOnly {
			continue
		}
		err = errors.Join(err, loopdev.Detach(one.Path))
		failpoint.Hit("driver-detached")
	}
	return err
}

// growDevices makes the loop devices as large as the image.
func (l *pool) growDevices(id string) error {
	found, err := l.attached(id)
	if err != nil {
		return err
	}
	for _, one := range found {
		err = errors.Join(err, loopdev.Grow(one.Path))
	}
	failpoint.Hit("driver-devices-grown")
	return err
}

// setDirectIO makes the loop devices do what the record says.
func (l *pool) setDirectIO(r *record) error {
	found, err := l.attached(r.ID)
	if err != nil {
		return err
	}
	for _, one := range found {
		err := loopdev.SetDirectIO(one.Path, !r.Buffered)
		if errors.Is(err, unix.EINVAL) {
			return status.Errorf(codes.InvalidArgument, "volume %q: the filesystem of its image offers no direct I/O for it: %v", r.ID, err)
		}
		if err != nil && !one.Leaving {
			return err
		}
	}
	return nil
}

// erase removes a volume that is not attached. The record first says that the
// image is to go, so that nobody takes a missing image for a loss.
func (l *pool) erase(r *record) error {
	if err := l.store.unready(r); err != nil {
		return err
	}
	failpoint.Hit("driver-erasing")
	if err := os.Remove(l.image(r.ID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := syncDir(l.images); err != nil {
		return err
	}
	failpoint.Hit("driver-image-removed")
	return l.store.remove(r.ID)
}

// sweep removes the volumes that were never finished, or not yet removed.
func (l *pool) sweep() error {
	if err := l.store.clean(); err != nil {
		return err
	}
	all, err := l.store.list()
	if err != nil {
		l.log.Error("some records cannot be read; their volumes are left alone", zap.Error(err))
	}
	for _, r := range all {
		if r.Ready || r.Snapshot != nil && r.Snapshot.Group != "" { // groups sweep up their own
			continue
		}
		if devices, err := l.attached(r.ID); err != nil || len(devices) > 0 {
			l.log.Warn("an unfinished volume is attached and left alone", zap.String("volume", r.ID), zap.Error(err))
			continue
		}
		if err := l.erase(r); err != nil {
			l.log.Error("an unfinished volume cannot be removed and is left alone", zap.String("volume", r.ID), zap.Error(err))
		}
	}
	return nil
}

// available is what is free of the configured capacity. Without one images are
// thin: it is what the filesystem has free now.
func (l *pool) available() (int64, error) {
	if l.config.Capacity == 0 {
		var fs unix.Statfs_t
		if err := unix.Statfs(l.images, &fs); err != nil {
			return 0, err
		}
		return int64(fs.Bavail) * fs.Bsize, nil //nolint:gosec // no filesystem has 2^63 bytes
	}
	all, err := l.store.list()
	if err != nil {
		l.log.Warn("volumes whose records cannot be read are not counted", zap.Error(err))
	}
	free := l.config.Capacity
	for _, r := range all {
		free -= r.Capacity
	}
	return max(free, 0), nil
}

// promise records a volume with more bytes promised to it, if there are as many.
func (l *pool) promise(r *record, more int64) error {
	l.provisioning.Lock()
	defer l.provisioning.Unlock()
	free, err := l.available()
	if err != nil {
		return err
	}
	if more > free {
		return status.Errorf(codes.ResourceExhausted, "volume %q: %d bytes are asked for and %d are free on node %s", r.ID, more, free, l.config.NodeID)
	}
	if r.Snapshot != nil {
		r.Snapshot.Number = l.nextNumber(r.Source)
	}
	return l.store.save(r)
}

// provision promises the capacity, records the volume and makes its image: blank, or
// by fill, which a volume with a source has. What fails leaves nothing.
func (l *pool) provision(r *record, fill func() error) error {
	err := l.promise(r, r.Capacity)
	if err == nil {
		failpoint.Hit("driver-recorded")
		err = fill()
	}
	if err == nil {
		err = l.makeImage(r)
	}
	if err == nil {
		failpoint.Hit("driver-image-made")
		r.Ready = true
		err = l.store.save(r)
	}
	if err != nil {
		return afterUndo(err, l.erase(r))
	}
	return nil
}

// nextNumber numbers a snapshot. The caller holds the lock of its volume.
func (l *pool) nextNumber(of source) int64 {
	all, err := l.store.list()
	if err != nil {
		l.log.Warn("snapshots whose records cannot be read are not counted", zap.Error(err))
	}
	last := int64(0)
	for _, r := range all {
		if r.Snapshot != nil && r.Source == of {
			last = max(last, r.Snapshot.Number)
		}
	}
	return last + 1
}

// blank is the fill of a volume that has no source.
func blank() error { return nil }

// volume gives a volume, finished or not, or nil. A snapshot is none.
func (l *pool) volume(id string) (*record, error) {
	r, err := l.store.load(id)
	if err != nil || r == nil || r.Snapshot != nil {
		return nil, err
	}
	return r, nil
}

// existing gives what an earlier call has made, or nil. What one has made or removed in
// part, with somebody's data in it, is removed.
func (l *pool) existing(id string) (*record, error) {
	r, err := l.store.load(id)
	if err != nil || r == nil || r.Ready {
		return r, err
	}
	return nil, l.erase(r)
}

// find gives a volume that exists.
func (l *pool) find(id string) (*record, error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	r, err := l.volume(id)
	if err != nil {
		return nil, err
	}
	if r == nil || !r.Ready {
		return nil, status.Errorf(codes.NotFound, "there is no volume %q on node %s", id, l.config.NodeID)
	}
	return r, nil
}
