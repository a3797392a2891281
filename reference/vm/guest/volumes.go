package guest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsmount"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

const (
	// volumesDir is where volumes are mounted, by their names.
	volumesDir = "/run/crust/volumes"
	frozenDir  = "/run/crust/frozen"
)

type volumes struct {
	locks sys.KeyLocks[string]

	mu     sync.Mutex
	byName map[string]*guestVolume
}

type guestVolume struct {
	info  abi.Info
	users atomic.Int32 // how many containers mount it
}

func newVolumes() *volumes { return &volumes{byName: make(map[string]*guestVolume)} }

func freezer() fsops.Freezer {
	return fsops.Freezer{Dir: frozenDir, Watchdog: []string{self, roleWatch}}
}

func volumePath(name string) string { return filepath.Join(volumesDir, name) }

func (v *volumes) get(name string) (*guestVolume, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if vol := v.byName[name]; vol != nil {
		return vol, nil
	}
	return nil, fmt.Errorf("volume: %w", errNotFound)
}

func (v *volumes) AddVolume(ctx context.Context, req *wire.AddVolumeRequest) (*wire.AddVolumeResponse, error) {
	if !abi.IsDirName(req.GetVolume()) || req.GetSerial() == "" {
		return nil, fmt.Errorf("the volume's name or the serial of its disk: %w", errInvalid)
	}
	unlock, err := v.locks.Lock(ctx, req.GetVolume())
	if err != nil {
		return nil, err
	}
	defer unlock()
	if _, err := v.get(req.GetVolume()); err == nil {
		return nil, fmt.Errorf("volume: %w", errExists)
	}
	modules := req.GetFsType()
	if strings.HasPrefix(modules, "ext") {
		modules = "ext4" // one driver for all of them
	}
	if err := initramfs.Load(modules); err != nil {
		return nil, fmt.Errorf("the filesystem %s: %w", req.GetFsType(), err)
	}
	waiting, cancel := context.WithTimeout(ctx, diskTimeout)
	defer cancel()
	device, err := findDisk(waiting, req.GetSerial())
	if err != nil {
		return nil, err
	}
	reply := new(wire.AddVolumeResponse)
	info := infoOf(req, device)
	if err := mountVolume(ctx, req.GetVolume(), info, reply); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil { // the host has given up
		waiting, cancel := context.WithTimeout(context.WithoutCancel(ctx), diskTimeout)
		defer cancel()
		return nil, errors.Join(err, unmountVolume(waiting, req.GetVolume(), device))
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.byName[req.GetVolume()] = &guestVolume{info: info}
	return reply, nil
}

// infoOf describes the volume as mountInfo.json describes it to a handler on the host.
func infoOf(req *wire.AddVolumeRequest, device string) abi.Info {
	info := abi.Info{VolumeType: abi.TypeBlock, Device: device, FSType: req.GetFsType(), Options: req.GetOptions(), Metadata: make(map[string]string)}
	if req.FsGroup != nil {
		info.Metadata[abi.MetaGroup] = strconv.FormatUint(uint64(req.GetFsGroup()), 10)
		info.Metadata[abi.MetaPolicy] = req.GetGroupPolicy()
	}
	return info
}

// mountVolume mounts the filesystem. It appears in volumesDir once containers can use it.
func mountVolume(ctx context.Context, name string, info abi.Info, reply *wire.AddVolumeResponse) error {
	device, err := os.Open(info.Device) // for reading: a kernel can refuse to mount what is open for writing
	if err != nil {
		return err
	}
	defer func() { _ = device.Close() }()
	mount, err := fsmount.Ready(ctx, info, int(device.Fd()), func(text string) { reply.Warning = wire.Text(text) })
	if err != nil {
		return err
	}
	defer sys.CloseFD(mount)
	if err := os.MkdirAll(volumePath(name), 0o700); err != nil {
		return err
	}
	return unix.MoveMount(mount, "", unix.AT_FDCWD, volumePath(name), unix.MOVE_MOUNT_F_EMPTY_PATH)
}

func (v *volumes) RemoveVolume(ctx context.Context, req *wire.RemoveVolumeRequest) (*wire.Empty, error) {
	return new(wire.Empty), v.remove(ctx, req.GetVolume())
}

func (v *volumes) remove(ctx context.Context, name string) error {
	unlock, err := v.locks.Lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	vol, err := v.get(name)
	if err != nil {
		return err
	}
	if vol.users.Load() > 0 {
		return fmt.Errorf("the volume is in use: %w", errState)
	}
	if err := unmountVolume(ctx, name, vol.info.Device); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.byName, name)
	return nil
}

// end syncs a volume, and unmounts it once no container uses it any more.
func (v *volumes) end(ctx context.Context, name string) error {
	// A process that waits to write to a frozen filesystem cannot be killed.
	_ = freezer().Thaw(name, -1)
	synced := syncVolume(name)
	err := retry(ctx, errState, func() error { return v.remove(ctx, name) })
	if errors.Is(err, errNotFound) {
		err = nil // a call that was busy with it has removed it
	}
	return errors.Join(synced, err)
}

// syncVolume makes the filesystem write all that is dirty.
func syncVolume(name string) error {
	root, err := unix.Open(volumePath(name), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0) // not O_PATH
	if err != nil {
		return err
	}
	defer sys.CloseFD(root)
	if err := unix.Syncfs(root); err != nil {
		return fmt.Errorf("sync: %w", err)
	}
	return nil
}

// syncTime bounds syncAll. It is shorter than the time in which the host kills a guest without an agent.
const syncTime = 20 * time.Second

// syncAll syncs all volumes at once, without those whose devices hang.
func syncAll(dir string, sync func(name string) error) {
	entries, _ := os.ReadDir(dir)
	names := make([]string, len(entries))
	for i, entry := range entries {
		names[i] = entry.Name()
	}
	_, _ = sys.All(names, syncTime, sync)
}

// unmountVolume unmounts a volume and waits until its disk is free.
func unmountVolume(ctx context.Context, name, device string) error {
	// The kernel keeps a frozen filesystem after its last unmount.
	_ = freezer().Thaw(name, -1)
	err := unix.Unmount(volumePath(name), unix.UMOUNT_NOFOLLOW)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount: %w", err)
	}
	if err := waitFree(ctx, device); err != nil {
		return err
	}
	return os.Remove(volumePath(name))
}

func (v *volumes) names() []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Collect(maps.Keys(v.byName))
}

// withRoot calls f with the open root directory of a volume.
func (v *volumes) withRoot(name string, f func(root int, info abi.Info) error) error {
	vol, err := v.get(name)
	if err != nil {
		return err
	}
	root, err := openMounted(volumePath(name))
	if err != nil {
		return err
	}
	defer sys.CloseFD(root)
	return f(root, vol.info)
}

// openMounted opens the root directory of a volume. Between its unmount and its removal, the directory is of the guest's
// own tmpfs.
func openMounted(path string) (int, error) {
	root, err := sys.OpenDir(path)
	if err != nil {
		return -1, err
	}
	var fs unix.Statfs_t // unlike statx, of a filesystem that has shut down, too
	err = unix.Fstatfs(root, &fs)
	if err == nil && fs.Type == unix.TMPFS_MAGIC {
		err = fmt.Errorf("the volume is not mounted: %w", errNotFound)
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(root))
	}
	return root, nil
}

func (v *volumes) GetVolumeStats(_ context.Context, req *wire.GetVolumeStatsRequest) (*wire.GetVolumeStatsResponse, error) {
	reply, name := new(wire.GetVolumeStatsResponse), req.GetVolume()
	err := v.withRoot(name, func(root int, info abi.Info) error {
		stat, err := freezer().Stat(name, root, info.ReadOnly())
		if err != nil {
			return err
		}
		for _, u := range stat.Usage {
			reply.Usage = append(reply.Usage, &wire.Usage{Unit: u.Unit, Available: u.Available, Total: u.Total, Used: u.Used})
		}
		c := stat.Condition
		reply.Abnormal, reply.Reason, reply.Message = c.Abnormal, c.Reason, wire.Text(c.Message)
		return nil
	})
	return reply, err
}

const (
	// diskTimeout bounds the wait for a disk to appear, sizeTimeout that for its new size.
	diskTimeout = time.Minute
	sizeTimeout = 10 * time.Second
)

func (v *volumes) ResizeVolume(ctx context.Context, req *wire.ResizeVolumeRequest) (*wire.Empty, error) {
	unlock, err := v.locks.Lock(ctx, req.GetVolume())
	if err != nil {
		return nil, err
	}
	defer unlock()
	return new(wire.Empty), v.withRoot(req.GetVolume(), func(root int, info abi.Info) error {
		if info.ReadOnly() {
			return fmt.Errorf("the volume is read-only: %w", errUnsupported)
		}
		device, err := os.Open(info.Device)
		if err != nil {
			return err
		}
		defer func() { _ = device.Close() }()
		waiting, cancel := context.WithTimeout(ctx, sizeTimeout)
		defer cancel()
		if err := waitSize(waiting, int(device.Fd()), req.GetSizeBytes()); err != nil {
			return err
		}
		_, err = fsops.Grow(root, int(device.Fd()), req.GetSizeBytes(), 0)
		return err
	})
}

// FreezeVolume thaws the volume again if the host has given up meanwhile: it would not thaw.
func (v *volumes) FreezeVolume(ctx context.Context, req *wire.FreezeVolumeRequest) (*wire.Empty, error) {
	return new(wire.Empty), v.withRoot(req.GetVolume(), func(root int, _ abi.Info) error {
		err := freezer().Freeze(req.GetVolume(), root, time.Duration(req.GetTimeoutMillis())*time.Millisecond)
		if err == nil && ctx.Err() != nil {
			err = errors.Join(ctx.Err(), freezer().Thaw(req.GetVolume(), root))
		}
		return err
	})
}

func (v *volumes) ThawVolume(_ context.Context, req *wire.ThawVolumeRequest) (*wire.Empty, error) {
	return new(wire.Empty), v.withRoot(req.GetVolume(), func(root int, _ abi.Info) error {
		return freezer().Thaw(req.GetVolume(), root)
	})
}
