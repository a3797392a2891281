package deferral

import "context"

// Projector is what the broker needs of a runtime handler: to show it a volume,
// to take that back, and to know whether a sandbox still has it. Publish and
// Retract are idempotent, and each leaves either the whole projection or none
// when it is killed.
type Projector interface {
	// Name is the handler's name in configuration, records and metrics.
	Name() string
	// Check tells, without touching anything, why the handler cannot serve the
	// volume; the error is classed Invalid or Unsupported.
	Check(v *Volume) error
	// Publish makes the projection exist and be right.
	Publish(ctx context.Context, v *Volume) error
	// Retract makes the projection not exist.
	Retract(ctx context.Context, v *Volume) error
	// InUse names a live sandbox that has the volume, or gives "".
	InUse(ctx context.Context, v *Volume) (sandbox string, err error)
	// Orphans lists projections that this handler made and that are not among
	// known, so that they can be retracted.
	Orphans(known func(Key) bool) ([]*Volume, error)
}

// Abilities are what the sandboxes of a handler can do beyond mounting a
// filesystem. The zero value is a handler that can do nothing more.
type Abilities struct {
	// GrowsAtMount: a filesystem that is smaller than its device is grown when
	// it is mounted.
	GrowsAtMount bool
	// FormatsBlank: a blank device is formatted at the first mount, and only
	// then.
	FormatsBlank bool
	// SELinux: mount options such as context= mean something in the sandbox.
	SELinux bool
	// HostMounts: the sandboxes' mounts are made by this node's own kernel. The
	// device must then stay mountable; the mount itself keeps others out.
	HostMounts bool
	// SubPaths: a container can be given a sub-directory of the volume, as kubelet
	// binds it.
	SubPaths bool
}

// Abled is a Projector that can do more than mount.
type Abled interface{ Abilities() Abilities }

func abilitiesOf(p Projector) Abilities {
	if able, ok := p.(Abled); ok {
		return able.Abilities()
	}
	return Abilities{}
}

// Preparer makes sure that a device holds the filesystem that the sandbox will
// be told to mount. It is asked before the device is claimed for good, with a
// descriptor of it, and is the only one who ever writes to a device.
type Preparer interface {
	Prepare(ctx context.Context, p Preparation) error
}

// Preparation is what a Preparer is told.
type Preparation struct {
	// Device is an O_PATH descriptor of the block device that was checked.
	Device int
	// Target names the volume, and Path the device, in errors.
	Target, Path string
	FSType       string
	Format       FormatPolicy
	ReadOnly     bool
	// GuestFormats is set where the sandbox formats a blank device by itself.
	GuestFormats bool
}
