// Package runtime defines the interface of a runtime handler: the part of the daemon that
// hands volumes to one kind of container runtime and sends requests to its sandboxes.
//
// It is for the daemon and for authors of handlers in this module. The interfaces may change with any release. Authors
// of container runtimes use the packages abi and oci instead; those are stable.
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
	// Runtime is the kind of sandbox, such as "kata-go" or "kata-rs".
	Runtime string
	// Since is when the binding was learned.
	Since time.Time
}

// Handler hands volumes to one kind of runtime and sends requests to its sandboxes. It is the whole contract between
// the daemon and a handler. A handler that can freeze volumes also implements Freezer. Every error has a volume.Kind
// and names the volume, the sandbox and the cause.
type Handler interface {
	// Projector is the part that the broker calls.
	deferral.Projector

	// Stats asks the volume's live sandbox for its usage. It never answers from memory.
	Stats(ctx context.Context, v *volume.Volume) (volume.Report, error)
	// Resize asks the volume's live sandbox to grow the filesystem, and returns the new size.
	Resize(ctx context.Context, v *volume.Volume, r volume.Range) (int64, error)

	// Binding returns the last known binding from memory. It never blocks.
	Binding(v *volume.Volume) (Binding, bool)
	// AdoptForeign finds the volumes that other programs published to this runtime. It is called once before anything
	// is served: their devices have an owner, and already the first call must respect it. Run finds later ones.
	AdoptForeign()
	// Adopted lists the volumes that other programs published, from memory.
	Adopted() []*volume.Volume
	// SandboxAdded and SandboxGone report what the container runtime says. They never block on a sandbox.
	SandboxAdded(podUID, sandboxID string)
	SandboxGone(sandboxID string)
	// Health returns what keeps the handler from working, or nil.
	Health(ctx context.Context) error
	// Run follows the sandboxes until ctx ends.
	Run(ctx context.Context) error
}

// Freezer is a Handler whose sandboxes can hold all writes to a volume.
type Freezer interface {
	// Freeze holds all writes until Thaw, or until the timeout has passed. If the volume is
	// frozen already, it stays so, and the error is volume.InUse.
	Freeze(ctx context.Context, v *volume.Volume, timeout time.Duration) error
	// Thaw lets writes go on. It also works after the sandbox has ended. If the volume was
	// not frozen until now, the error is volume.InUse: a copy of it may be inconsistent.
	Thaw(ctx context.Context, v *volume.Volume) error
}

// GroupIgnored explains volume.Report.GroupIgnored, and what to do.
const GroupIgnored = "Kata's runtime-rs ignores fsGroup, and the root directory of the volume is not known to be writable for the " +
	"group: a pod that is not root may get Permission denied; run chgrp and chmod g+w on the volume in a pod that is root once, or use Kata's Go runtime"
