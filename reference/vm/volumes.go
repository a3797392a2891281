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

// volumes are those of a sandbox: each is plugged in for its first container, and stays
// until the sandbox ends. The image of a container's root filesystem is one, too, and goes
// with the container.
type volumes struct {
	sandbox string
	machine *qemu.Machine
	guest   *wire.Client
	warn    func(string)

	plugging sync.Mutex // held while a disk is plugged, unplugged or resized
	mu       sync.RWMutex
	of       map[string]*attached
}

type attached struct {
	info abi.Info
	disk *qemu.Disk
	// thaws is when a freeze of it is over at the latest. A process that waits to write then
	// cannot be killed, and its guest does not hang.
	thaws atomic.Pointer[time.Time]
}

// frozen tells whether a volume may be frozen.
func (v *volumes) frozen() bool {
	v.mu.RLock()
	defer v.mu.RUnlock()
	for _, a := range v.of {
		if until := a.thaws.Load(); until != nil && time.Now().Before(*until) {
			return true
		}
	}
	return false
}

// ensure makes the guest have the volume mounted. When it fails, the guest does not have
// the disk either.
func (v *volumes) ensure(ctx context.Context, name string, info abi.Info, open func() (*os.File, error)) error {
	v.plugging.Lock()
	defer v.plugging.Unlock()
	if _, err := v.get(name); err == nil {
		return nil
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
	if err := v.mount(ctx, name, info, serial); err != nil {
		// The guest may still use it: only the end of its machine is a proof.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), unplugTime)
		defer cancel()
		return errors.Join(err, v.machine.Unplug(ctx, disk))
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.of[name] = &attached{info: info, disk: disk}
	return nil
}

// unplugTime bounds the wait for a guest that lets go of a disk.
const unplugTime = 15 * time.Second

// unplugAll takes back the disks whose volumes no container has any more. It does not wait
// for a guest that takes its time with another disk.
func (v *volumes) unplugAll(ctx context.Context) error {
	if !v.plugging.TryLock() {
		return errors.New("a disk is being plugged in or taken back")
	}
	defer v.plugging.Unlock()
	ctx, cancel := context.WithTimeout(ctx, unplugTime)
	defer cancel()
	var errs []error
	for name, a := range v.of {
		if err := v.unplug(ctx, name, a); err != nil {
			errs = append(errs, fmt.Errorf("volume %s: %w", a.info.Target(), err))
		}
	}
	return errors.Join(errs...)
}

// remove takes back the disk of a volume, if there is one.
func (v *volumes) remove(ctx context.Context, name string) error {
	v.plugging.Lock()
	defer v.plugging.Unlock()
	a, err := v.get(name)
	if err != nil {
		return nil //nolint:nilerr // there is none
	}
	ctx, cancel := context.WithTimeout(ctx, unplugTime)
	defer cancel()
	return v.unplug(ctx, name, a)
}

// unplug goes on where an earlier one has come to its end too soon.
func (v *volumes) unplug(ctx context.Context, name string, a *attached) error {
	_, err := v.guest.RemoveVolume(ctx, &wire.RemoveVolumeRequest{Volume: name})
	if err != nil && status.Code(err) != codes.NotFound {
		return err
	}
	if err := v.machine.Unplug(ctx, a.disk); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.of, name)
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
	answer, err := v.guest.AddVolume(ctx, req)
	if err != nil {
		return kindOf(err)
	}
	if answer.GetWarning() != "" {
		v.warn(fmt.Sprintf("volume %s: %s", info.Target(), answer.GetWarning()))
	}
	return nil
}

// openDevice opens the volume's device. While it is open for writing, by us or by QEMU,
// nobody else can claim it: no other sandbox, and no mount of this node.
func openDevice(info abi.Info) (*os.File, error) {
	open := handler.ClaimDevice
	if info.ReadOnly() {
		open = handler.OpenDevice
	}
	fd, err := open(info)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), info.Device), nil
}

func (v *volumes) get(volume string) (*attached, error) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	if a := v.of[volume]; a != nil {
		return a, nil
	}
	return nil, handler.ErrNoSandbox
}

// ask does something about the volume of a target path.
func (v *volumes) ask(target string, f func(ctx context.Context, name string, a *attached) error) error {
	name := abi.DirName(target)
	a, err := v.get(name)
	if err == nil {
		// The guest's client bounds each call more closely.
		ctx, cancel := context.WithTimeout(context.Background(), askTime)
		defer cancel()
		err = f(ctx, name, a)
	}
	if err != nil {
		return fmt.Errorf("volume %s: sandbox %s: %w", target, v.sandbox, kindOf(err))
	}
	return nil
}

const askTime = 2 * time.Minute

// Stats measures the filesystem now.
func (v *volumes) Stats(target string) (reply abi.StatsReply, sandbox string, err error) {
	err = v.ask(target, func(ctx context.Context, name string, _ *attached) error {
		answer, err := v.guest.GetVolumeStats(ctx, &wire.GetVolumeStatsRequest{Volume: name})
		if err != nil {
			return err
		}
		for _, u := range answer.GetUsage() {
			reply.Usage = append(reply.Usage, abi.Usage{Available: u.GetAvailable(), Total: u.GetTotal(), Used: u.GetUsed(), Unit: u.GetUnit()})
		}
		reply.Condition = &abi.Condition{Abnormal: answer.GetAbnormal(), Message: answer.GetMessage(), Reason: answer.GetReason()}
		return nil
	})
	return reply, v.sandbox, err
}

// Resize tells the machine that the device has grown, and makes the filesystem fill it.
func (v *volumes) Resize(target string, least, most int64) (size int64, err error) {
	err = v.ask(target, func(ctx context.Context, name string, a *attached) error {
		if a.info.ReadOnly() {
			return fmt.Errorf("%w: the volume is read-only", fsops.ErrUnsupported)
		}
		v.plugging.Lock()
		defer v.plugging.Unlock()
		size, err = v.machine.Resize(ctx, a.disk)
		if err != nil {
			return err
		}
		if size < least || most > 0 && size > most {
			return fmt.Errorf("%w: the device has %d bytes", fsops.ErrOutOfRange, size)
		}
		_, err = v.guest.ResizeVolume(ctx, &wire.ResizeVolumeRequest{Volume: name, SizeBytes: size})
		return err
	})
	return size, err
}

// Freeze holds all writes until Thaw, or until the time is over.
func (v *volumes) Freeze(target string, timeout time.Duration) error {
	return v.ask(target, func(ctx context.Context, name string, a *attached) error {
		if timeout < time.Millisecond || timeout > fsops.MostFrozen {
			return fmt.Errorf("%w: the time must be at most %v", fsops.ErrOutOfRange, fsops.MostFrozen)
		}
		until := time.Now().Add(timeout)
		if is := a.thaws.Load(); is == nil || is.Before(until) {
			a.thaws.Store(&until)
		}
		_, err := v.guest.FreezeVolume(ctx, &wire.FreezeVolumeRequest{Volume: name, TimeoutMillis: uint32(timeout.Milliseconds())}) //nolint:gosec // bounded
		return err
	})
}

// Thaw lets writes go on.
func (v *volumes) Thaw(target string) error {
	return v.ask(target, func(ctx context.Context, name string, a *attached) error {
		_, err := v.guest.ThawVolume(ctx, &wire.ThawVolumeRequest{Volume: name})
		if err == nil {
			a.thaws.Store(nil)
		}
		if status.Code(err) == codes.FailedPrecondition {
			err = fmt.Errorf("%w: what was read of its device meanwhile may be of different times: %w", fsops.ErrNotFrozen, err)
		}
		return err
	})
}

// ThawExpired has nothing to do: the guest thaws by itself.
func (v *volumes) ThawExpired() abi.ThawExpiredReply { return abi.ThawExpiredReply{} }

// kinds are those that the ABI has for errors of a guest, or of its supervisor.
var kinds = map[codes.Code]error{
	codes.NotFound: handler.ErrNoSandbox, codes.Unimplemented: fsops.ErrUnsupported,
	codes.OutOfRange: fsops.ErrOutOfRange, codes.FailedPrecondition: fsops.ErrFrozen,
}

// kindOf gives an error of the guest its kind. That a volume is not there is none of its to
// say: the host knows what it has plugged in, and without a sandbox a binding ends.
func kindOf(err error) error {
	said, is := status.FromError(err)
	if !is || err == nil || errors.Is(err, fsops.ErrNotFrozen) {
		return err
	}
	if kind := kinds[said.Code()]; kind != nil && said.Code() != codes.NotFound {
		return fmt.Errorf("%w: %s", kind, said.Message())
	}
	return errors.New(said.Message())
}
