package deferral

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Projector is what the broker needs of a runtime handler: to publish a volume to it, to
// retract that, and to know whether a sandbox still has the volume. Publish and Retract
// are idempotent. If they are killed, they leave either the whole projection or none.
type Projector interface {
	// Name is the handler's name in configuration, records and metrics.
	Name() string
	// Abilities are what its sandboxes can do beyond mounting a filesystem.
	Abilities() Abilities
	// Check returns why the handler cannot serve the volume, without changing anything;
	// the error is Invalid or Unsupported.
	Check(v *volume.Volume) error
	// Publish makes the projection exist and be right, and reports whether it had to
	// change anything. It may keep v, which nobody changes any more.
	Publish(ctx context.Context, v *volume.Volume) (changed bool, err error)
	// Retract removes the projection.
	Retract(ctx context.Context, v *volume.Volume) error
	// InUse names a live sandbox that may have the volume, or returns "". The error is a ForgottenError
	// if there are only sandboxes that the container runtime has forgotten.
	InUse(ctx context.Context, v *volume.Volume) (sandbox string, err error)
	// Orphans lists projections of this handler whose volumes are not known, so that they can be retracted.
	Orphans(known func(volume.Key) bool) ([]*volume.Volume, error)
}

// Tracker is a Projector that can ask the container runtime itself about sandboxes.
type Tracker interface{ Tracking() Tracking }

// Tracking asks the container runtime itself about the sandboxes of volumes.
type Tracking interface {
	// Withdraw removes the projection, so that from now on no sandbox finds the volume. What is known of
	// its sandboxes stays, and Publish makes the projection again.
	Withdraw(ctx context.Context, v *volume.Volume) error
	// Disowned returns nil if the container runtime answers twice, and lists none of the sandboxes.
	Disowned(ctx context.Context, v *volume.Volume, sandboxes []string) error
	// Sandboxes lists those that are known to have had the volume.
	Sandboxes(v *volume.Volume) []string
	// Several reports, from memory, whether they are several, of which the container runtime lists the last or, where
	// that is not known, any.
	Several(v *volume.Volume) bool
	// ForgetEnded forgets those that have ended, and of which no process has the device.
	ForgetEnded(v *volume.Volume, hasDevice func(sandbox string) bool)
}

// ForgottenError is part of the error for forgotten sandboxes: their shims answer, but the container
// runtime does not list them. It is used only while the container runtime is followed.
type ForgottenError struct{ Sandboxes []string }

func (e *ForgottenError) Error() string {
	return "the shim of sandbox " + strings.Join(e.Sandboxes, ", ") + " answers, although the container runtime does not list it"
}

// NewForgotten is the error of InUse for forgotten sandboxes.
func NewForgotten(v *volume.Volume, sandboxes ...string) error {
	return forgottenError(v, &ForgottenError{Sandboxes: sandboxes})
}

func forgottenError(v *volume.Volume, of *ForgottenError) error {
	return volume.Errorf(volume.Busy, "volume %s: %w, so the sandbox may have the device %s: repeat, or end the shim and its VM", v.Target, of, v.Device.Path)
}

func forgottenIn(err error) *ForgottenError {
	of, _ := errors.AsType[*ForgottenError](err)
	return of
}

// Abilities are what the sandboxes of a handler can do beyond mounting a
// filesystem. The zero value is a handler that can do nothing more.
type Abilities struct {
	// GrowsAtMount: a filesystem that is smaller than its device is grown when it is mounted.
	GrowsAtMount bool
	// SELinux: mount options such as context= mean something in the sandbox.
	SELinux bool
	// HostMounts: the sandboxes' mounts are made by this node's own kernel. The
	// device must then stay mountable; the mount itself keeps others out.
	HostMounts bool
	// SubPaths: a container can be given a sub-directory of the volume, as a bind mount of the guard.
	SubPaths bool
}

type handlerSet struct {
	byName    map[string]Projector
	byDefault string
}

func newHandlerSet(all []Projector, byDefault string) (*handlerSet, error) {
	s := &handlerSet{byName: make(map[string]Projector, len(all)), byDefault: byDefault}
	for _, h := range all {
		s.byName[h.Name()] = h
	}
	if s.byName[byDefault] == nil {
		return nil, volume.Errorf(volume.Invalid, "the default handler %q is not configured", byDefault)
	}
	return s, nil
}

func (s *handlerSet) choose(in *volume.Instruction) (Projector, error) {
	name := cmp.Or(in.Handler, s.byDefault)
	handler := s.byName[name]
	if handler == nil {
		return nil, invalid(in, "the runtime handler %q is not configured", sys.Clip(name))
	}
	return handler, nil
}

// of returns the handler of a volume, or all if that is not known.
func (s *handlerSet) of(v *volume.Volume) []Projector {
	if v.Handler == "" {
		return slices.Collect(maps.Values(s.byName))
	}
	if handler := s.byName[v.Handler]; handler != nil {
		return []Projector{handler}
	}
	return nil
}

// withdraw has no sandbox find the volume any more. What is tracked of its sandboxes stays until forget: an
// orphan may be in the way of its release.
func (s *handlerSet) withdraw(ctx context.Context, v *volume.Volume, force bool) error {
	for _, handler := range s.of(v) {
		retract := handler.Retract
		if tracker, able := handler.(Tracker); able && !force {
			retract = tracker.Tracking().Withdraw
		}
		if err := retract(ctx, v); err != nil {
			return err
		}
	}
	return nil
}

// forget forgets what is tracked of the sandboxes of a volume that was withdrawn.
func (s *handlerSet) forget(ctx context.Context, v *volume.Volume) error {
	for _, handler := range s.of(v) {
		if _, able := handler.(Tracker); !able {
			continue
		}
		if err := handler.Retract(ctx, v); err != nil {
			return err
		}
	}
	return nil
}

// tracking returns what asks about the sandboxes of a volume, if its handler can.
func (s *handlerSet) tracking(v *volume.Volume) (Tracking, bool) {
	handler, able := s.byName[v.Handler].(Tracker)
	if !able {
		return nil, false
	}
	return handler.Tracking(), true
}

// abilities are none for a handler that is not configured.
func (s *handlerSet) abilities(name string) Abilities {
	if handler := s.byName[name]; handler != nil {
		return handler.Abilities()
	}
	return Abilities{}
}

// refuseBound returns an error while a handler knows of a sandbox that has the volume.
func (s *handlerSet) refuseBound(ctx context.Context, v *volume.Volume) error {
	for _, handler := range s.of(v) {
		if err := refuseInUse(ctx, handler, v); err != nil {
			return err
		}
	}
	return nil
}

// StopSandbox is what to do about a sandbox that does not end by itself.
const StopSandbox = "if nothing ends it, `crictl stopp` it, or end its VM (never only its shim)"

func refuseInUse(ctx context.Context, handler Projector, v *volume.Volume) error {
	sandbox, err := handler.InUse(ctx, v)
	if err != nil {
		return err
	}
	if sandbox != "" {
		return volume.Errorf(volume.Busy, "volume %s: the sandbox %s has not ended, and may have its device %s: repeat when it has; "+
			StopSandbox, v.Target, sandbox, v.Device.Path)
	}
	return nil
}

// Preparer makes sure that a device holds the filesystem that the sandbox is to mount. It is called before the device
// is claimed for good, and is the only part of the daemon that writes to a device.
type Preparer interface {
	Prepare(ctx context.Context, p Preparation) error
}

// Preparation is a device to prepare.
type Preparation struct {
	// Device is an O_PATH descriptor of the block device that was checked.
	Device int
	// Volume is to get the device, and Instruction says what becomes of a blank one.
	Volume      *volume.Volume
	Instruction *volume.Instruction
	// NoReplay is set if the volume's mount options skip the replay of its journal.
	NoReplay bool
	// Grow is set if a filesystem that is smaller than its device is to be grown on this
	// node, because its sandbox cannot.
	Grow bool
}
