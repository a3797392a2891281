package kata

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/projection"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// inUse returns a sandbox that has the volume or may have it, or "".
//
// A sandbox has ended when the container runtime does not list it and nobody listens on its shim's socket. One that
// is not listed and whose shim answers is forgotten, if the container runtime is being followed. Another process can
// still have the device, such as a VMM that outlived its shim: the broker checks that.
func (b *bindings) inUse(ctx context.Context, v *volume.Volume) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", guest.ContextError(v, "", err)
	}
	// Read before the list of the pod's sandboxes: if it was ready, only those are missing that are newer than the
	// tracker's last listing. Of such a sandbox of runtime-rs, only its open device shows.
	ready := b.sandboxes != nil && b.sandboxes.Ready()
	candidates, unread := b.candidates(v)
	id, forgotten, err := b.living(ctx, v, candidates, ready)
	switch {
	case id != "" || err != nil:
		return id, err
	case unread != nil:
		return "", unknown(v, "a Kata sandbox", "the volume's directory cannot be read", unread)
	case b.sandboxes == nil:
		return "", nil // there are only the files of Kata's Go runtime
	case !ready:
		return "", b.refuseUnknown(v)
	case v.PodUID == "" && v.ResolvedTarget != "": // of an orphan, only notes may be left
		if id, err := b.mountedBy(ctx, v); id != "" || err != nil {
			return id, err
		}
	}
	if len(forgotten) > 0 {
		return "", deferral.NewForgotten(v, forgotten...)
	}
	return "", nil
}

// living returns the first of the candidates that may live, or those that are forgotten.
func (b *bindings) living(ctx context.Context, v *volume.Volume, candidates []string, ready bool) (found string, forgotten []string, err error) {
	for _, id := range candidates {
		served, err := b.hasShim(id)
		switch {
		case b.lists(ctx, id):
			return id, nil, nil
		case err != nil:
			return "", nil, unknown(v, "Kata sandbox "+id, "its shim's socket cannot be reached", err)
		case served && !ready:
			return id, nil, nil
		case served:
			forgotten = append(forgotten, id)
		}
	}
	return "", forgotten, nil
}

// askAgain is the time between two answers of the container runtime. Tests change it.
var askAgain = time.Second

// Disowned returns nil if the container runtime itself answers twice, and lists none of the sandboxes.
func (b *bindings) Disowned(ctx context.Context, v *volume.Volume, ids []string) error {
	what := "Kata sandbox " + strings.Join(ids, ", ")
	if b.sandboxes == nil {
		return unknown(v, what, "no container runtime is configured", errors.New("set containerd.socket or cri.socket"))
	}
	for again := range 2 {
		if again > 0 && !sys.Sleep(ctx, askAgain) {
			return guest.ContextError(v, "", ctx.Err())
		}
		live, err := b.sandboxes.Listed(ctx, ids...)
		if err != nil {
			return unknown(v, what, "the container runtime cannot be asked", err)
		}
		for _, id := range ids {
			if live[id] {
				return volume.Errorf(volume.Busy, "volume %s: the container runtime lists Kata sandbox %s again: repeat; "+deferral.StopSandbox, v.Target, id)
			}
		}
	}
	return nil
}

// refuseUnknown is inUse while the container runtime cannot be asked: an error, unless no
// Kata sandbox of the node can be the volume's.
func (b *bindings) refuseUnknown(v *volume.Volume) error {
	id, err := b.unattributed(v.PodUID)
	if err != nil {
		return unknown(v, "a Kata sandbox", "the container runtime cannot be asked and the node's sandboxes cannot be listed", err)
	}
	if id == "" {
		return nil
	}
	if err = b.sandboxes.LastError(); err == nil { // it has become ready just now, and the next call knows
		return volume.Errorf(volume.Busy, "volume %s: it is not known yet whether Kata sandbox %s has it: repeat", v.Target, id)
	}
	return unknown(v, "Kata sandbox "+id+", which lives,", "the container runtime cannot be asked: repeat when it can be; "+
		"if the node has another container runtime, set containerd.socket or cri.socket to its socket and restart crust-proxy", err)
}

// mountedBy finds the sandbox of a volume whose target names no pod, by the mounts of all containers.
func (b *bindings) mountedBy(ctx context.Context, v *volume.Volume) (string, error) {
	ids, unread, err := b.sandboxes.Mounting(ctx, v.Target, v.ResolvedTarget)
	if err != nil {
		return "", unknown(v, "a Kata sandbox", "the container runtime cannot be asked which containers mount it", err)
	}
	for _, id := range ids {
		if abi.IsSandboxID(id) {
			b.notes.add(v.Key, id, b.ended)
			return id, nil
		}
	}
	for id, err := range unread {
		if abi.IsSandboxID(id) && b.mayBeKata(id) {
			return "", unknown(v, "Kata sandbox "+id, "the container runtime does not say what its containers mount", err)
		}
	}
	return "", nil
}

// mayBeKata reports whether a sandbox has files of Kata, also if its shim has ended.
func (b *bindings) mayBeKata(id string) bool {
	return slices.ContainsFunc([]string{b.cfg.GoSandboxes, b.cfg.RustSandboxes}, func(root string) bool {
		return !errors.Is(unix.Access(filepath.Join(root, id), unix.F_OK), unix.ENOENT)
	})
}

// unknown is the error if it is not known whether a sandbox, or any, still has the volume.
func unknown(v *volume.Volume, sandbox, why string, err error) error {
	return volume.Errorf(volume.Busy, "volume %s: it is not known whether %s still has it, because %s: %w", v.Target, sandbox, why, err)
}

// maxSandboxes bounds a listing of the node's Kata sandboxes.
const maxSandboxes = 4096

// mayLive reports whether a sandbox is listed by the container runtime or has a shim.
func (b *bindings) mayLive(id string) (bool, error) {
	if b.isListed(id) {
		return true, nil
	}
	return b.hasShim(id)
}

// listTime bounds one listing for a release.
const listTime = 2 * time.Second

// lists reports whether the container runtime lists a sandbox. What is in memory can be some seconds older than
// the end of a sandbox, for which kubelet would have to repeat its call: so the runtime itself is asked then.
func (b *bindings) lists(ctx context.Context, id string) bool {
	if !b.isListed(id) || !b.sandboxes.Ready() {
		return b.isListed(id)
	}
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	live, err := b.sandboxes.Listed(ctx, id)
	return err != nil || live[id]
}

func (b *bindings) isListed(id string) (listed bool) {
	if b.sandboxes != nil {
		_, listed = b.sandboxes.PodOf(id)
	}
	return listed
}

// ended reports whether a sandbox is proven to have ended.
func (b *bindings) ended(id string) bool {
	if b.sandboxes != nil && !b.sandboxes.Ready() {
		return false
	}
	lives, err := b.mayLive(id)
	return err == nil && !lives
}

func (b *bindings) hasShim(id string) (bool, error) {
	for _, f := range []flavor{goShim, rustShim} {
		if served, err := sys.IsServed(b.cfg.socketOf(id, f)); served || err != nil {
			return served, err
		}
	}
	return false, nil
}

// mayHave reports whether a sandbox can have a volume of this pod: it is not known to be another pod's.
func (b *bindings) mayHave(id, podUID string) bool {
	return abi.IsSandboxID(id) && !projection.OfOtherPod(b.sandboxes, id, podUID)
}

// unattributed returns a sandbox of the node that has a shim and is not known to be another pod's, or "".
func (b *bindings) unattributed(podUID string) (string, error) {
	for _, root := range []string{b.cfg.GoSandboxes, b.cfg.RustSandboxes} {
		names, err := projection.ReadNames(root, maxSandboxes+1)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return "", err
		}
		if len(names) > maxSandboxes {
			return "", fmt.Errorf("%s holds more than %d", root, maxSandboxes)
		}
		for _, id := range names {
			if !b.mayHave(id, podUID) {
				continue
			}
			if lives, err := b.hasShim(id); lives || err != nil {
				return id, err
			}
		}
	}
	return "", nil
}

// Withdraw removes the volume's directory, if it is ours. The sandboxes whose ids are in it stay known.
func (b *bindings) Withdraw(ctx context.Context, v *volume.Volume) error {
	ids, err := b.candidates(v)
	if err != nil {
		return unknown(v, "a Kata sandbox", "the volume's directory cannot be read", err)
	}
	for _, id := range ids {
		b.notes.add(v.Key, id, func(string) bool { return false })
	}
	return b.store.Retract(ctx, v)
}

// Sandboxes lists the sandboxes that are known to have had the volume, and those of its pod.
func (b *bindings) Sandboxes(v *volume.Volume) []string {
	ids, _ := b.candidates(v) // without those in a directory that cannot be read
	return ids
}

// Several reports whether sandboxes were seen to have the volume before one that is listed.
func (b *bindings) Several(v *volume.Volume) bool {
	return slices.ContainsFunc(b.notes.last(v.Key), b.isListed)
}

// ForgetEnded forgets those that have ended, unless a VM has outlived them.
func (b *bindings) ForgetEnded(v *volume.Volume, hasDevice func(id string) bool) {
	b.notes.dropEnded(v.Key, func(id string) bool { return !hasDevice(id) && b.ended(id) })
}
