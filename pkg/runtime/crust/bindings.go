package crust

import (
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/projection"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// bindings records which sandbox has a volume, for lists and to report changes. What a
// call needs is read from the volume's directory each time.
type bindings struct {
	table     *projection.Bindings
	layout    layout
	sandboxes Sandboxes // nil where no container runtime is followed
}

func (b *bindings) bind(key volume.Key, id string) { b.table.Bind(key, id, Name) }

// seen records that a sandbox-id file appeared: the newest one is the live one until
// shown otherwise.
func (b *bindings) seen(key volume.Key, id string) {
	if e, tracked := b.table.Get(key); tracked && abi.IsSandboxID(id) && !b.ofOtherPod(id, e.Volume) {
		b.bind(key, id)
	}
}

// readDir reads a volume's directory. An id of another pod's sandbox must be a lie, and
// is left out.
func (b *bindings) readDir(v *volume.Volume) (*dirSnapshot, error) {
	return b.layout.readDir(v, func(id string) bool { return b.ofOtherPod(id, v) })
}

func (b *bindings) ofOtherPod(id string, v *volume.Volume) bool {
	return projection.OfOtherPod(b.sandboxes, id, v.PodUID)
}

// isGone tells whether the container runtime has no such sandbox. It may not have
// reported a new one yet.
func (b *bindings) isGone(id string) bool {
	if b.sandboxes == nil || !b.sandboxes.Ready() {
		return false
	}
	_, known := b.sandboxes.PodOf(id)
	return !known
}
