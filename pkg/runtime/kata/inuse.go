package kata

import (
	"context"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// inUse names a sandbox that has the volume or may have it.
//
// A sandbox has ended when the container runtime does not list it and nobody
// listens on its shim's socket. Whether another process has the device all the same,
// such as a VMM that outlived its shim, is for the broker to find out.
func (b *bindings) inUse(ctx context.Context, v *volume.Volume) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", guest.ContextError(v, "", err)
	}
	// Asked before the list of the pod's sandboxes is read: one that is ready is whole.
	ready := b.sandboxes != nil && b.sandboxes.Ready()
	for _, id := range b.candidates(v) {
		if lives, err := b.mayLive(id); err != nil {
			return "", socketUnknown(v, id, err)
		} else if lives {
			return id, nil
		}
	}
	switch {
	case b.sandboxes == nil:
		return "", nil // the files of Kata's Go runtime are all there is to know
	case !ready:
		return "", b.refuseUnknown(v)
	case v.PodUID == "":
		return b.mountedBy(ctx, v)
	}
	return "", nil
}

// refuseUnknown answers while the container runtime cannot be asked. Only where no
// Kata sandbox of the node can be the volume's, that does not matter.
func (b *bindings) refuseUnknown(v *volume.Volume) error {
	id, err := b.unattributed(v.PodUID)
	if err != nil {
		return shimsUnknown(v, err)
	}
	if id == "" {
		return nil
	}
	return runtimeUnknown(v, id, b.sandboxes.LastError())
}

// mountedBy finds the sandbox of a volume whose target does not name the pod, by
// the mounts of all containers.
func (b *bindings) mountedBy(ctx context.Context, v *volume.Volume) (string, error) {
	ids, err := b.sandboxes.Mounting(ctx, v.Target, v.ResolvedTarget)
	if err != nil {
		return "", mountsUnknown(v, err)
	}
	for _, id := range ids {
		if abi.IsSandboxID(id) {
			b.notes.add(v.Key, id, b.ended)
			return id, nil
		}
	}
	return "", nil
}

func socketUnknown(v *volume.Volume, id string, err error) error {
	return volume.Errorf(volume.Busy, "volume %s: it is not known whether Kata sandbox %s still has it, "+
		"because its shim's socket cannot be tried: %w", v.Target, id, err)
}

func shimsUnknown(v *volume.Volume, err error) error {
	return volume.Errorf(volume.Busy, "volume %s: it is not known whether a Kata sandbox still has it, "+
		"because the container runtime cannot be asked and the node's sandboxes cannot be listed: %w", v.Target, err)
}

func runtimeUnknown(v *volume.Volume, id string, err error) error {
	if err == nil { // it has become ready just now, and the next call knows
		return volume.Errorf(volume.Busy, "volume %s: it is not known yet whether Kata sandbox %s has it: repeat", v.Target, id)
	}
	return volume.Errorf(volume.Busy, "volume %s: it is not known whether Kata sandbox %s, which lives, has it, because the "+
		"container runtime cannot be asked: repeat when it can be; if the node has another container runtime, set "+
		"containerd.socket or cri.socket to its socket and restart crust-proxy: %w", v.Target, id, err)
}

func mountsUnknown(v *volume.Volume, err error) error {
	return volume.Errorf(volume.Busy, "volume %s: it is not known whether a Kata sandbox still has it, "+
		"because the container runtime cannot be asked which containers mount it: %w", v.Target, err)
}
