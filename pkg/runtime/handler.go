// Package runtime is the seam between the broker and the sandboxes: what a
// runtime handler is. Handlers live in packages below it.
package runtime

import (
	"context"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
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

// Handler hands volumes to one kind of runtime and talks to its sandboxes.
// Every error is classed (see deferral.Kind) and names volume, sandbox and cause.
type Handler interface {
	deferral.Projector

	// Stats asks the live sandbox of the volume. It never answers from memory.
	Stats(ctx context.Context, v *deferral.Volume) (deferral.Report, error)
	// Resize asks the live sandbox to grow the filesystem and tells its new size.
	Resize(ctx context.Context, v *deferral.Volume, r deferral.Range) (int64, error)

	// Binding is the last known binding, from memory: it never blocks.
	Binding(v *deferral.Volume) (Binding, bool)
	// Adopted lists the volumes that other programs published to this runtime.
	Adopted() []*deferral.Volume
	// Health tells what is missing for the handler to work, or nil.
	Health(ctx context.Context) error
	// Run follows the sandboxes until ctx ends.
	Run(ctx context.Context) error
}
