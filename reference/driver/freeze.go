package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/moby/sys/mountinfo"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

// freezer holds the writes to a volume in use while its content is taken, so that its
// filesystem is consistent there. Each freeze ends by itself, whatever dies.
type freezer struct {
	log       *zap.Logger
	limit     time.Duration
	node      fsops.Freezer
	sandboxes sandboxes
}

const (
	// commandWatch is how this program starts itself to thaw what a driver that was killed
	// has left frozen.
	commandWatch = "watch-frozen"
	// controlGroup is that of these processes, which must not end together with the driver.
	controlGroup = "crust-driver"
)

func newFreezer(config Config, boot string) (*freezer, error) {
	records, err := frozenDir(config.DataDir, boot)
	return &freezer{
		log: config.Log, limit: config.FreezeLimit, sandboxes: sandboxes{socket: config.CrustProxySocket, driver: config.Name},
		node: fsops.Freezer{
			Dir: records, Watchdog: []string{"/proc/self/exe", commandWatch}, ControlGroup: controlGroup,
		},
	}, err
}

// frozenDir gives a directory for records of freezes, which end with the boot, and removes
// those of earlier boots.
func frozenDir(dataDir, boot string) (string, error) {
	dir := filepath.Join(dataDir, "frozen")
	earlier, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	for _, one := range earlier {
		if one.Name() != boot {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, one.Name())))
		}
	}
	return filepath.Join(dir, boot), err
}

// inUse is a volume that may be written to by a device.
type inUse struct{ id, device string }

// hold calls take while nobody writes to volumes in use, and gives those that may have been
// written to: what is taken of one that cannot be frozen is as after a crash. With two of
// them, nothing would be of one moment any more: that is an error.
func (f *freezer) hold(ctx context.Context, volumes []inUse, take func() error) (free []string, err error) {
	began := time.Now()
	held, free, err := f.freezeAll(ctx, volumes)
	failpoint.Hit("driver-frozen")
	if err == nil {
		err = take()
	}
	failpoint.Hit("driver-taken")
	if ended := f.thawAll(held); len(ended) > 0 {
		free = append(free, ended...)
		if len(free) > 1 && err == nil {
			err = status.Errorf(codes.Aborted, "volumes %q were not frozen all the time of at most %v: what was taken is not of one moment",
				free, f.limit)
		}
	}
	if len(held) > 0 {
		f.log.Info("held the writes to volumes", zap.Int("volumes", len(held)), zap.Duration("took", time.Since(began)))
	}
	return free, err
}

// freezeAll freezes volumes all at once, so that their time is over together. It fails if
// two of them stay free; those that are held have to be thawed also then.
func (f *freezer) freezeAll(ctx context.Context, volumes []inUse) (held map[string]func() error, free []string, err error) {
	if len(volumes) > 1 {
		f.syncAll(ctx, volumes)
	}
	held, failed := f.tryAll(ctx, volumes)
	if errors.Is(errors.Join(slices.Collect(maps.Values(failed))...), fsops.ErrFrozen) {
		f.log.Info("a volume is frozen already, as a driver leaves it that is killed: waiting for the end of that", zap.Duration("time", f.limit+lateEnd))
		f.thawAll(held)
		if !sys.Sleep(ctx, f.limit+lateEnd) {
			return nil, nil, status.FromContextError(ctx.Err()).Err()
		}
		held, failed = f.tryAll(ctx, volumes)
	}
	for id, err := range failed {
		f.log.Warn("the volume cannot be frozen: what is taken of it is as after a crash", zap.String("volume", id), zap.Error(err))
	}
	if free = slices.Sorted(maps.Keys(failed)); len(free) > 1 {
		err = status.Errorf(codes.FailedPrecondition, "volumes %q are in use and cannot be frozen: what is taken of them is not of one moment: %v",
			free, errors.Join(slices.Collect(maps.Values(failed))...))
	}
	return held, free, err
}

// lateEnd is how late a freeze may end.
const lateEnd = 500 * time.Millisecond

// syncAll writes most of what is dirty, so that no volume waits, frozen, until another one's
// data is on the disk. A sandbox writes it to be frozen, and only then. What fails here, the
// freeze reports.
func (f *freezer) syncAll(ctx context.Context, volumes []inUse) {
	var all sync.WaitGroup
	for _, v := range volumes {
		all.Go(func() {
			if root, err := openMounted(v.device); root != nil {
				_ = unix.Syncfs(int(root.Fd()))
				_ = root.Close()
			} else if err == nil {
				if thaw, err := f.sandboxes.freeze(ctx, v.id, f.limit); err == nil {
					_ = thaw()
				}
			}
		})
	}
	all.Wait()
}

// tryAll freezes volumes all at once, and gives the errors of those that stay free.
func (f *freezer) tryAll(ctx context.Context, volumes []inUse) (held map[string]func() error, failed map[string]error) {
	held, failed = make(map[string]func() error), make(map[string]error)
	var all sync.WaitGroup
	var mu sync.Mutex
	for _, v := range volumes {
		all.Go(func() {
			thaw, err := f.freeze(ctx, v.id, v.device)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed[v.id] = err
			} else {
				held[v.id] = thaw
			}
		})
	}
	all.Wait()
	return held, failed
}

// thawAll thaws volumes all at once, and gives those that were not frozen all the time.
func (f *freezer) thawAll(held map[string]func() error) (ended []string) {
	var all sync.WaitGroup
	var mu sync.Mutex
	for id, thaw := range held {
		all.Go(func() {
			err := thaw()
			if err == nil {
				return
			}
			f.log.Warn("the volume was not frozen all the time: what was taken of it is as after a crash", zap.String("volume", id), zap.Error(err))
			mu.Lock()
			defer mu.Unlock()
			ended = append(ended, id)
		})
	}
	all.Wait()
	return ended
}

// freeze freezes the filesystem where it is mounted: here, or in a sandbox. ErrFrozen: it is
// frozen, by a driver that was killed or by somebody else, whose freeze is left alone.
func (f *freezer) freeze(ctx context.Context, id, device string) (thaw func() error, err error) {
	root, err := openMounted(device)
	if err != nil {
		return nil, err
	}
	if root == nil {
		return f.sandboxes.freeze(ctx, id, f.limit)
	}
	fd := int(root.Fd())
	if err := f.node.Freeze(id, fd, f.limit); err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return func() error { return errors.Join(f.node.Thaw(id, fd), root.Close()) }, nil
}

// openMounted opens the filesystem on a device where it is mounted on this node. It gives
// nil where it is not.
func openMounted(device string) (*os.File, error) {
	found, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.Source != device || !slices.Contains(fileSystems, m.FSType), false
	})
	for _, m := range found {
		if top, err := mountAt(m.Mountpoint); err == nil && top != nil && top.ID == m.ID {
			return os.Open(m.Mountpoint)
		}
	}
	if err == nil && len(found) > 0 {
		err = fmt.Errorf("something else is mounted over %s", found[0].Mountpoint)
	}
	return nil, err
}

// thawLeft thaws, until ctx ends, what an earlier life of the driver has left frozen when
// it was killed and its watchdogs were, too.
func (f *freezer) thawLeft(ctx context.Context) error {
	for {
		thawed, next, err := f.node.ThawExpired()
		if err != nil {
			f.log.Warn("what was left frozen cannot be thawed", zap.Error(err))
		}
		for _, id := range thawed {
			f.log.Warn("a volume was left frozen and has been thawed", zap.String("volume", id))
		}
		if next == 0 || !sys.Sleep(ctx, next) {
			return nil
		}
	}
}
