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
