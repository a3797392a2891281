package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/vm/qemu"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// volumes are the disks of a sandbox. A volume is plugged in for the first container that
// mounts it, and stays until the sandbox ends.
type volumes struct {
	sandbox string
	machine disks
	guest   *wire.Client
	warn    func(string)

	plugging sync.Mutex // held while a disk is plugged in, unplugged or resized
	mu       sync.RWMutex
	byName   map[string]*attachedVolume
}

// disks is a qemu.Machine.
type disks interface {
	Plug(ctx context.Context, serial string, file *os.File, readOnly bool) (*qemu.Disk, error)
	Unplug(ctx context.Context, d *qemu.Disk) error
	Resize(ctx context.Context, d *qemu.Disk, accept func(size int64) error) (int64, error)
}

type attachedVolume struct {
	info    abi.Info
	disk    *qemu.Disk
	mounted bool // if not, its disk is still to be unplugged
	// frozenUntil is the latest end of its last freeze. Until then a process that waits to write
	// cannot be killed, which does not mean that the guest hangs.
	frozenUntil atomic.Pointer[time.Time]
}

// checkSame refuses what was published again as something else while the machine has the volume: its claim was released by
// force, and the disk would be the old one.
func (a *attachedVolume) checkSame(info abi.Info) error {
	device := func(i abi.Info) string {
		major, minor, _, err := i.DeviceNumber()
		return fmt.Sprint(i.Device, major, minor, err, i.FSType, i.ReadOnly())
	}
	if device(a.info) != device(info) {
		return errors.New("it was released by force, and published again with another device, filesystem or access: delete the pod")
	}
	return nil
}

func (v *volumes) frozen() bool {
	v.mu.RLock()
	defer v.mu.RUnlock()
	for _, a := range v.byName {
		if until := a.frozenUntil.Load(); until != nil && time.Now().Before(*until) {
			return true
		}
	}
	return false
}

// attach plugs the volume in and mounts it in the guest, unless that was done. When it fails,
// the disk is unplugged, now or before the next attempt.
func (v *volumes) attach(ctx context.Context, name string, info abi.Info, open func() (*os.File, error)) error {
	v.plugging.Lock()
	defer v.plugging.Unlock()
	if a, err := v.get(name); err == nil {
		return a.checkSame(info)
	}
	if left := v.byName[name]; left != nil {
		if err := v.unplug(ctx, name, left); err != nil {
			return fmt.Errorf("an earlier attempt to mount it failed, and its disk is not free: %w", err)
		}
	}
	device, err := open()
	if err != nil {
		return err
	}
	serial := name[:qemu.SerialSize]
	disk, err := v.machine.Plug(ctx, serial, device, info.ReadOnly())
	if err != nil {
		return err
	}
	err = v.mount(ctx, name, info, serial)
	a := &attachedVolume{info: info, disk: disk, mounted: err == nil}
	v.mu.Lock()
	v.byName[name] = a
	v.mu.Unlock()
	if err != nil {
		return errors.Join(err, v.unplug(context.WithoutCancel(ctx), name, a)) // also if the caller has gone
	}
	return nil
}

// detachUnused unplugs a disk, unless a container uses it: then the guest refuses.
func (v *volumes) detachUnused(ctx context.Context, name string) {
	v.plugging.Lock()
	defer v.plugging.Unlock()
	if a, err := v.get(name); err == nil {
		_ = v.unplug(ctx, name, a)
	}
}

// unplugTimeout bounds the wait for a guest to release a disk.
const unplugTimeout = 15 * time.Second

// detachAll unplugs all disks, when no container uses them any more. It does not wait for a
// call that is busy with a disk.
func (v *volumes) detachAll(ctx context.Context) error {
	if !v.plugging.TryLock() {
		return errors.New("a disk is being plugged in or unplugged")
	}
	defer v.plugging.Unlock()
	ctx, cancel := context.WithTimeout(ctx, unplugTimeout)
	defer cancel()
	var errs []error
	for name, a := range v.byName {
		if err := v.unplug(ctx, name, a); err != nil {
			errs = append(errs, fmt.Errorf("volume %s: %w", a.info.Target(), err))
		}
	}
	return errors.Join(errs...)
}

// unplug continues an unplug that did not complete earlier.
func (v *volumes) unplug(ctx context.Context, name string, a *attachedVolume) error {
	ctx, cancel := context.WithTimeout(ctx, unplugTimeout)
	defer cancel()
	_, err := v.guest.RemoveVolume(ctx, &wire.RemoveVolumeRequest{Volume: name})
	if err != nil && status.Code(err) != codes.NotFound {
		return err
	}
	v.mu.Lock()
	a.mounted = false // a container that mounts it later has its disk plugged in again
	v.mu.Unlock()
	if err := v.machine.Unplug(ctx, a.disk); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.byName, name)
	return nil
}

func (v *volumes) mount(ctx context.Context, name string, info abi.Info, serial string) error {
	gid, wanted, err := info.Group()
	if err != nil {
		return err
	}
	req := &wire.AddVolumeRequest{
		Volume: name, Serial: serial, FsType: info.FSType, Options: info.Options,
		GroupPolicy: string(info.GroupPolicy()),
	}
	if wanted {
		req.FsGroup = &gid
	}
	reply, err := v.guest.AddVolume(ctx, req)
	if err != nil {
		return withKind(err)
	}
	if reply.GetWarning() != "" {
		v.warn(fmt.Sprintf("volume %s: %s", info.Target(), reply.GetWarning()))
	}
	return nil
}

// openDevice opens the volume's device. While this process or QEMU has it open for writing,
// no other sandbox can claim it, and no mount namespace of this node can mount it.
func openDevice(dir *abi.Dir, info abi.Info) (*os.File, error) {
	open := handler.ClaimDevice
	if info.ReadOnly() {
		open = handler.OpenDevice
	}
	fd, err := handler.OpenPublished(dir, info, open)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), info.Device), nil
}

func (v *volumes) get(volume string) (*attachedVolume, error) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	if a := v.byName[volume]; a != nil && a.mounted {
		return a, nil
	}
	return nil, handler.ErrNoSandbox
}

// withVolume calls f for the volume of a target path.
func (v *volumes) withVolume(target string, f func(ctx context.Context, name string, a *attachedVolume) error) error {
	name := abi.DirName(target)
	a, err := v.get(name)
	if err == nil {
		// wire.Client bounds each call more closely.
		ctx, cancel := context.WithTimeout(context.Background(), volumeCallTimeout)
		defer cancel()
		err = f(ctx, name, a)
	}
	if err != nil {
		return fmt.Errorf("volume %s: sandbox %s: %w", target, v.sandbox, withKind(err))
	}
	return nil
}

const volumeCallTimeout = 2 * time.Minute

func (v *volumes) Stats(target string) (reply abi.StatsReply, sandbox string, err error) {
	err = v.withVolume(target, func(ctx context.Context, name string, _ *attachedVolume) error {
		stats, err := v.guest.GetVolumeStats(ctx, &wire.GetVolumeStatsRequest{Volume: name})
		if err != nil {
			return err
		}
		for _, u := range stats.GetUsage() {
			reply.Usage = append(reply.Usage, abi.Usage{Available: u.GetAvailable(), Total: u.GetTotal(), Used: u.GetUsed(), Unit: u.GetUnit()})
		}
		reply.Condition = &abi.Condition{Abnormal: stats.GetAbnormal(), Message: stats.GetMessage(), Reason: stats.GetReason()}
		return nil
	})
	return reply, v.sandbox, err
}

// Resize passes the device's new size to the machine, and grows the filesystem to it.
func (v *volumes) Resize(target string, required, limit int64) (size int64, err error) {
	err = v.withVolume(target, func(ctx context.Context, name string, a *attachedVolume) error {
		if a.info.ReadOnly() {
			return fmt.Errorf("%w: the volume is read-only", fsops.ErrUnsupported)
		}
		v.plugging.Lock() // not while the guest grows it, which may take long: it locks this volume alone
		size, err = v.machine.Resize(ctx, a.disk, func(size int64) error {
			if size < required || limit > 0 && size > limit {
				return fmt.Errorf("%w: the device has %d bytes", fsops.ErrOutOfRange, size)
			}
			return nil
		})
		v.plugging.Unlock()
		if err != nil {
			return err
		}
		_, err = v.guest.ResizeVolume(ctx, &wire.ResizeVolumeRequest{Volume: name, SizeBytes: size})
		return err
	})
	return size, err
}

func (v *volumes) Freeze(target string, timeout time.Duration) error {
	return v.withVolume(target, func(ctx context.Context, name string, a *attachedVolume) error {
		if timeout < time.Millisecond || timeout > fsops.MostFrozen {
			return fmt.Errorf("%w: the time must be at most %v", fsops.ErrOutOfRange, fsops.MostFrozen)
		}
		until, earlier := time.Now().Add(timeout), a.frozenUntil.Load()
		if earlier == nil || earlier.Before(until) {
			a.frozenUntil.Store(&until)
		}
		_, err := v.guest.FreezeVolume(ctx, &wire.FreezeVolumeRequest{Volume: name, TimeoutMillis: uint32(timeout.Milliseconds())}) //nolint:gosec // bounded
		// Without an answer it may be frozen, and with FailedPrecondition it is, by somebody else.
		if code := status.Code(err); err != nil && code != codes.Unknown && code != codes.FailedPrecondition {
			a.frozenUntil.CompareAndSwap(&until, earlier)
		}
		return err
	})
}

func (v *volumes) Thaw(target string) error {
	return v.withVolume(target, func(ctx context.Context, name string, a *attachedVolume) error {
		_, err := v.guest.ThawVolume(ctx, &wire.ThawVolumeRequest{Volume: name})
		if err == nil {
			a.frozenUntil.Store(nil)
		}
		if status.Code(err) == codes.FailedPrecondition {
			err = fmt.Errorf("%w: what was read of its device meanwhile may be of different times: %w", fsops.ErrNotFrozen, err)
		}
		return err
	})
}

// ThawExpired does nothing: the guest thaws by itself.
func (v *volumes) ThawExpired() abi.ThawExpiredReply { return abi.ThawExpiredReply{} }

// kindOfCode maps the codes of a guest, or of its supervisor, to the ABI's kinds of errors.
var kindOfCode = map[codes.Code]error{
	codes.NotFound: handler.ErrNoSandbox, codes.Unimplemented: fsops.ErrUnsupported,
	codes.OutOfRange: fsops.ErrOutOfRange, codes.FailedPrecondition: fsops.ErrFrozen,
}

// withKind gives an error of the guest its kind. A guest's NotFound is not believed: only the
// host knows which disks are plugged in, and ErrNoSandbox would end the volume's binding.
func withKind(err error) error {
	is, ok := status.FromError(err)
	if !ok || err == nil || errors.Is(err, fsops.ErrNotFrozen) {
		return err
	}
	if kind := kindOfCode[is.Code()]; kind != nil && is.Code() != codes.NotFound {
		return fmt.Errorf("%w: %s", kind, is.Message())
	}
	return errors.New(is.Message())
}
