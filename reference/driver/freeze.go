package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/moby/sys/mountinfo"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

// freezer freezes volumes in use while their content is captured. A freeze ends after a time, whichever process dies.
type freezer struct {
	log       *zap.Logger
	limit     time.Duration
	node      fsops.Freezer
	sandboxes sandboxes
}

const (
	// commandWatch starts this program as a watchdog, which thaws a filesystem if the driver is killed.
	commandWatch = "watch-frozen"
	// controlGroup is the control group of the watchdogs, which must outlive the driver.
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

// frozenDir returns the directory for the records of freezes, and removes those of earlier boots.
func frozenDir(dataDir, boot string) (string, error) {
	dir := filepath.Join(dataDir, "frozen")
	earlier, err := os.ReadDir(dir)
	err = sys.UnlessMissing(err)
	for _, one := range earlier {
		if one.Name() != boot {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, one.Name())))
		}
	}
	return filepath.Join(dir, boot), err
}

// inUse is a volume in use, with the loop device by which it may be written to.
type inUse struct{ id, device string }

// hold calls capture while the volumes are frozen. It returns those that were not frozen all the time: what is captured
// of them is as after a crash. With two of them hold fails, because their contents would be of different moments.
func (f *freezer) hold(ctx context.Context, volumes []inUse, capture func() error) (free []string, err error) {
	began := time.Now()
	held, free, err := f.freezeAll(ctx, volumes)
	failpoint.Hit("driver-frozen")
	if err == nil {
		err = flushDevices(volumes)
	}
	if err == nil {
		err = capture()
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

// freezeAll freezes volumes in parallel, so that their freezes end at the same time. It fails
// if two of them cannot be frozen. Volumes that are held must be thawed in any case.
func (f *freezer) freezeAll(ctx context.Context, volumes []inUse) (held map[string]func() error, free []string, err error) {
	f.syncAll(ctx, volumes)
	held, failed := f.tryAll(ctx, volumes)
	if errors.Is(joined(failed), fsops.ErrFrozen) {
		f.log.Info("a volume is frozen already, as a driver leaves it that is killed: waiting for the end of that", zap.Duration("time", f.limit+lateEnd))
		f.thawAll(held)
		if !sys.Sleep(ctx, f.limit+lateEnd) {
			return nil, nil, status.FromContextError(ctx.Err()).Err()
		}
		held, failed = f.tryAll(ctx, volumes)
	}
	switch {
	case ctx.Err() != nil:
		return held, nil, status.FromContextError(ctx.Err()).Err() // it may be why they are not frozen
	case errors.Is(joined(failed), errAway):
		return held, nil, status.Errorf(codes.Unavailable, "a snapshot made now would be as after a crash: start crust-proxy, or remove its socket: %v", joined(failed))
	}
	for id, err := range failed {
		f.log.Warn("the volume cannot be frozen: what is taken of it is as after a crash", zap.String("volume", id), zap.Error(err))
	}
	if free = slices.Sorted(maps.Keys(failed)); len(free) > 1 {
		err = status.Errorf(codes.FailedPrecondition, "volumes %q are in use and cannot be frozen: what is taken of them is not of one moment: %v",
			free, joined(failed))
	}
	return held, free, err
}

func joined(failed map[string]error) error {
	return errors.Join(slices.Collect(maps.Values(failed))...)
}

// flushes are bounded: the storage below a device may hang, and the volume is locked meanwhile.
var flushes = sys.Looks[string]{Time: syncTime}

// flushDevices writes what the node's page cache has of devices to their images. It is little if the guest has synced
// its own, unless a VMM without direct I/O ignores that, or the guest mounts without barriers.
func flushDevices(volumes []inUse) error {
	for _, v := range volumes {
		_, err := sys.Look(&flushes, v.device, func() (_ struct{}, err error) {
			device, err := os.Open(v.device)
			if err == nil {
				err = errors.Join(device.Sync(), device.Close())
			}
			return struct{}{}, err
		})
		if err != nil {
			return fmt.Errorf("write what the node has cached of volume %q: %w", v.id, err)
		}
	}
	return nil
}

// lateEnd is how long after its limit a freeze may end.
const lateEnd = 3 * time.Second

// syncTime is longer than a freeze may take, as nothing else waits then.
const syncTime = 30 * time.Second

// syncAll writes most of the dirty data, so that no volume stays frozen while another one's data is written. The only way
// to make a sandbox do so is to freeze and thaw the volume. Errors are ignored: the freeze that follows reports them.
func (f *freezer) syncAll(ctx context.Context, volumes []inUse) {
	var all sync.WaitGroup
	for _, v := range volumes {
		all.Go(func() {
			if root, err := openMounted(v.device); root != nil {
				_ = unix.Syncfs(int(root.Fd()))
				_ = root.Close()
			} else if err == nil {
				if thaw, err := f.sandboxes.freeze(ctx, v.id, f.limit, syncTime); err == nil {
					_ = thaw()
				}
			}
			_ = flushDevices([]inUse{v})
		})
	}
	all.Wait()
}

// tryAll freezes volumes in parallel, and returns the errors of those that are not frozen.
func (f *freezer) tryAll(ctx context.Context, volumes []inUse) (held map[string]func() error, failed map[string]error) {
	thaws, errs := make([]func() error, len(volumes)), make([]error, len(volumes))
	var all sync.WaitGroup
	for i, v := range volumes {
		all.Go(func() { thaws[i], errs[i] = f.freeze(ctx, v.id, v.device) })
	}
	all.Wait()
	held, failed = make(map[string]func() error), make(map[string]error)
	for i, v := range volumes {
		if errs[i] != nil {
			failed[v.id] = errs[i]
		} else {
			held[v.id] = thaws[i]
		}
	}
	return held, failed
}

// thawAll thaws volumes in parallel, and returns those that were not frozen all the time.
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

// freeze freezes the filesystem where it is mounted: on the node, or in a sandbox. The error is
// ErrFrozen if it is frozen already, by a driver that was killed or by another program.
func (f *freezer) freeze(ctx context.Context, id, device string) (thaw func() error, err error) {
	root, err := openMounted(device)
	if err != nil {
		return nil, err
	}
	if root == nil {
		return f.sandboxes.freeze(ctx, id, f.limit, f.limit+answerTime)
	}
	fd := int(root.Fd())
	if err := f.node.Freeze(id, fd, f.limit); err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return func() error { return errors.Join(f.node.Thaw(id, fd), root.Close()) }, nil
}

// openMounted opens the root of the filesystem on a device, or returns nil if it is not mounted on this node.
func openMounted(device string) (*os.File, error) {
	found, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.Source != device || !slices.Contains(fileSystems, m.FSType), false
	})
	for _, m := range found {
		if top, err := mountAt(m.Mountpoint); err == nil && top != nil && top.ID == m.ID {
			return openRoot(m.Mountpoint, device)
		}
	}
	if err == nil && len(found) > 0 {
		err = fmt.Errorf("something else is mounted over %s", found[0].Mountpoint)
	}
	return nil, err
}

// openRoot opens the root of a mount. It fails if another filesystem is there by now.
func openRoot(path, device string) (*os.File, error) {
	root, err := os.Open(path) //nolint:gosec // by the table of mounts
	if err != nil {
		return nil, err
	}
	var node unix.Stat_t
	if err = unix.Stat(device, &node); err == nil {
		err = fsops.LiesOn(int(root.Fd()), node.Rdev)
	}
	if err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return root, nil
}

// thawLeft thaws, until ctx ends, what was left frozen because an earlier driver and its watchdogs were killed.
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

// sandboxes are the sandboxes that have volumes of this driver, by crust-proxy's Admin API.
type sandboxes struct{ socket, driver string }

// answerTime is how long crust-proxy may take to answer, in addition to the time of a freeze.
const answerTime = 5 * time.Second

// errAway means that crust-proxy has a socket, and does not answer: it is started again.
var errAway = errors.New("crust-proxy does not answer")

// freeze asks the sandbox that has a volume to freeze its filesystem for at most limit, and waits for that.
func (s sandboxes) freeze(ctx context.Context, id string, limit, wait time.Duration) (thaw func() error, err error) {
	if s.socket == "" {
		return nil, errors.New("it is not mounted on this node, and without --crust-proxy-socket no sandbox can be asked")
	}
	conn, err := grpc.NewClient("unix:"+pathOf(s.socket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	admin := adminv1.NewAdminClient(conn)
	asking, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	volume, err := s.find(asking, admin, id)
	if _, missing := os.Stat(pathOf(s.socket)); status.Code(err) == codes.Unavailable && missing == nil {
		err = fmt.Errorf("%w: %w", errAway, err)
	}
	if err == nil {
		_, err = admin.FreezeVolume(asking, &adminv1.FreezeVolumeRequest{Volume: volume, Timeout: durationpb.New(limit)})
	}
	if status.Code(err) == codes.FailedPrecondition {
		err = fmt.Errorf("%w: %w", fsops.ErrFrozen, err)
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	frozen := time.Now() // the sandbox counts from after it has written its data, which may take longer than the limit
	return func() error {
		// Also if the caller no longer waits.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerTime)
		defer cancel()
		took := time.Since(frozen)
		_, err := admin.ThawVolume(ctx, &adminv1.ThawVolumeRequest{Volume: volume})
		if err == nil && took > limit {
			err = fmt.Errorf("the freeze had ended when it was thawed after %v: somebody else has frozen it since", took)
		}
		return errors.Join(err, conn.Close())
	}, nil
}

// find returns crust-proxy's id of the volume, at the target where it may be written to: not where
// another pod was refused, or where it was released. The one that a sandbox has comes first.
func (s sandboxes) find(ctx context.Context, admin adminv1.AdminClient, id string) (found string, err error) {
	for token := ""; ; {
		page, err := admin.ListVolumes(ctx, &adminv1.ListVolumesRequest{Driver: s.driver, PageToken: token})
		if err != nil {
			return "", err
		}
		for _, v := range page.GetVolumes() {
			if v.GetVolumeId() != id || v.GetReadOnly() {
				continue
			}
			switch v.GetState() {
			case adminv1.VolumeState_VOLUME_STATE_BOUND:
				return v.GetId(), nil
			case adminv1.VolumeState_VOLUME_STATE_REFUSED, adminv1.VolumeState_VOLUME_STATE_HELD:
			case adminv1.VolumeState_VOLUME_STATE_REMOVING:
				found = cmp.Or(found, v.GetId()) // its sandbox may not have ended
			default:
				found = v.GetId()
			}
		}
		if token = page.GetNextPageToken(); token == "" && found == "" {
			err = fmt.Errorf("no sandbox has it, by crust-proxy at %s", s.socket)
		}
		if token == "" {
			return found, err
		}
	}
}
