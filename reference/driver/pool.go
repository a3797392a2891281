package driver

import (
	"cmp"
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

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
)

// pool manages the records of volumes, their images and the loop devices over them.
type pool struct {
	config Config
	log    *zap.Logger
	store  store
	images string
	// sectorSize is the sector size of the loop devices of new volumes; with 0 the kernel chooses it.
	sectorSize uint32
	// provisioning is held while capacity is reserved, so that two calls do not get the same.
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

// sectorSize returns the sector size of new loop devices: the smallest with which a new image allows direct I/O. Volumes
// keep what is on record, because a filesystem may not be mounted with another one. A clone on xfs, which shares data,
// would need larger sectors: it does without direct I/O.
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
	if stat.Dio_offset_align > 4096 { // no device has larger sectors
		return 0, nil
	}
	return stat.Dio_offset_align, nil
}

// openProbe opens an empty file with which the features of the filesystem are tried. It is
// kept after the first start, so that the driver can start on a full disk and remove volumes.
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

// makeImage makes the image, or grows it to the capacity. It never shrinks an image.
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
	return errors.Join(file.Sync(), sys.SyncDir(l.images))
}

func (l *pool) attached(id string) ([]loopdev.Attached, error) {
	if _, err := os.Stat(l.image(id)); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return loopdev.Over(l.image(id))
}

// writable returns the path of the loop device by which the volume may be written to, or "".
func (l *pool) writable(id string) (path string, err error) {
	found, _, err := l.settled(id)
	for _, one := range found {
		if !one.ReadOnly {
			path = one.Path
		}
	}
	return path, err
}

// leavingTries and leavingPause bound the wait for a device that goes away when its last user, such as udev, closes it.
const (
	leavingTries = 20
	leavingPause = 50 * time.Millisecond
)

// settled is attached, after waiting for devices that are going away. leaving reports whether one is still there.
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

// attach returns the volume's loop device, and makes one if there is none.
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
	path, err := loopdev.Attach(l.image(r.ID), loopdev.Options{ReadOnly: readOnly, DirectIO: !r.Buffered, SectorSize: cmp.Or(r.Sector, l.sectorSize)})
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
		err = errors.Join(err, loopdev.DetachFrom(l.image(id), one.Path))
		failpoint.Hit("driver-detached")
	}
	return err
}

// beginWriting records, before somebody may write to a volume, that it is not as it was frozen, and if any program may
// write to its device, not even known to have its filesystem.
func (l *pool) beginWriting(r *record, block bool) error {
	if !r.AsFrozen && (!block || r.Holds == "") {
		return nil
	}
	if r.AsFrozen = false; block {
		r.Holds = ""
	}
	return l.store.save(r)
}

func (l *pool) growDevices(id string) error {
	found, err := l.attached(id)
	if err != nil {
		return err
	}
	for _, one := range found {
		if !one.Leaving { // one that is leaving may be free by now
			err = errors.Join(err, loopdev.Grow(one.Path))
		}
	}
	failpoint.Hit("driver-devices-grown")
	return err
}

// setDirectIO turns direct I/O of the loop devices on or off, as the record says.
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

// erase removes a volume that is not attached. The record says so first: a missing image is not taken for lost data.
func (l *pool) erase(r *record) error {
	if err := l.store.unready(r); err != nil {
		return err
	}
	failpoint.Hit("driver-erasing")
	if err := os.Remove(l.image(r.ID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := sys.SyncDir(l.images); err != nil {
		return err
	}
	failpoint.Hit("driver-image-removed")
	return l.store.remove(r.ID)
}

// sweep removes volumes that were not completed, and those that were not removed completely. The rest get a sector size.
func (l *pool) sweep() error {
	if err := l.store.clean(); err != nil {
		return err
	}
	all, err := l.store.list()
	if err != nil {
		l.log.Error("some records cannot be read; their volumes are left alone", zap.Error(err))
	}
	for _, r := range all {
		if r.Ready && r.Sector == 0 && l.sectorSize != 0 { // of an earlier version
			r.Sector = l.sectorSize
			if err := l.store.save(r); err != nil {
				l.log.Error("the sector size of a volume cannot be recorded", zap.String("volume", r.ID), zap.Error(err))
			}
		}
		if r.Ready || r.Snapshot != nil && r.Snapshot.Group != "" { // groups.sweep removes those
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

// available returns how many bytes can be reserved: of the configured capacity or, if there is none, of the filesystem.
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

// reserve saves the record of a volume to which more bytes are promised, if so many are available.
// Without a configured capacity only those count that need room on the disk.
func (l *pool) reserve(r *record, more, needed int64) error {
	l.provisioning.Lock()
	defer l.provisioning.Unlock()
	if l.config.Capacity == 0 {
		more = needed
	}
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

// provision reserves the capacity, records the volume and makes its image, which fill gives
// its content, and which needs room on the disk. If it fails, nothing is left.
func (l *pool) provision(r *record, needed int64, fill func() error) error {
	r.Sector = l.sectorSize
	err := l.reserve(r, r.Capacity, needed)
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

// nextNumber returns the number of a new snapshot. The caller holds the lock of its volume.
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

// provisionBlank is provision for a volume that has no source.
func (l *pool) provisionBlank(r *record) error {
	return l.provision(r, r.Capacity, func() error { return nil })
}

// volume returns the record of a volume, which may be unfinished, or nil. Snapshots are not volumes.
func (l *pool) volume(id string) (*record, error) {
	r, err := l.store.load(id)
	if err != nil || r == nil || r.Snapshot != nil {
		return nil, err
	}
	return r, nil
}

func (l *pool) existing(id string) (*record, error) { return l.store.existing(id, l.erase) }

// find returns the record of a volume that exists, or NOT_FOUND.
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
