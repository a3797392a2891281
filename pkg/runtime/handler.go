// Package runtime defines what a runtime handler is: the part of the daemon that
// hands volumes to one kind of container runtime and talks to its sandboxes.
//
// It is for the daemon and for authors of handlers inside this module. The interfaces
// may change with any release. Authors of container runtimes use the packages abi and
// oci instead; those are stable.
package runtime

import (
	"context"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Binding is one sandbox attempt that has a volume.
type Binding struct {
	// Sandbox is the sandbox id of the container runtime.
	Sandbox string
	// Runtime tells the kind of sandbox, such as "kata-go" or "kata-rs".
	Runtime string
	// Since is when the binding was learned.
	Since time.Time
}

// Handler hands volumes to one kind of runtime and talks to its sandboxes. It is
// the whole contract between the daemon and a handler; a handler that can do more
// also implements Freezer. Every error has a volume.Kind and names the volume, the
// sandbox and the cause.
type Handler interface {
	// Projector is the part that the broker uses.
	deferral.Projector

	// Stats asks the live sandbox of the volume. It never answers from memory.
	Stats(ctx context.Context, v *volume.Volume) (volume.Report, error)
	// Resize asks the live sandbox to grow the filesystem and tells its new size.
	Resize(ctx context.Context, v *volume.Volume, r volume.Range) (int64, error)

	// Binding is the last known binding, from memory: it never blocks.
	Binding(v *volume.Volume) (Binding, bool)
	// AdoptForeign finds the volumes that other programs published to this runtime.
	// It is called once before anything is served: their devices have an owner, which
	// the first call must already respect. Run finds later ones.
	AdoptForeign()
	// Adopted lists the volumes that other programs published, from memory.
	Adopted() []*volume.Volume
	// SandboxAdded and SandboxGone report what the container runtime says. They never
	// block on a sandbox.
	SandboxAdded(podUID, sandboxID string)
	SandboxGone(sandboxID string)
	// Health tells what is missing for the handler to work, or nil.
	Health(ctx context.Context) error
	// Run follows the sandboxes until ctx ends.
	Run(ctx context.Context) error
}

// Freezer is a Handler whose sandboxes can hold all writes to a volume.
type Freezer interface {
	// Freeze holds all writes until Thaw, or until the timeout has passed. A volume that
	// is frozen already stays so: volume.InUse.
	Freeze(ctx context.Context, v *volume.Volume, timeout time.Duration) error
	// Thaw lets writes go on. It also works after the sandbox has ended. A volume that was
	// not frozen up to now is volume.InUse: what was read of it may be of different times.
	Thaw(ctx context.Context, v *volume.Volume) error
}
