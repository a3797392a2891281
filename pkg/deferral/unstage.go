package deferral

import (
	"context"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
)

// undoTime bounds a roll-back, which goes on when its caller has gone.
const undoTime = 30 * time.Second

// rollBack undoes a failed stage and tells its cause. Where the undoing fails
// too, the error is one to retry: a final one would promise that nothing is left.
func (b *Broker) rollBack(ctx context.Context, rec *record, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	b.remember(rec)
	if err := b.undo(ctx, rec, nil); err != nil {
		return Errorf(Busy, "%w; and it could not be undone yet: %w", cause, err)
	}
	return cause
}

// Unstage gives a volume back. A target that is unknown is a success.
func (b *Broker) Unstage(ctx context.Context, path string) (*Volume, error) {
	t, err := b.targets.resolve(path)
	if err != nil {
		return nil, err
	}
	defer t.close()
	if known := b.entry(t.key()); known != nil && !known.removing {
		if err := b.refuseUsed(ctx, known.rec); err != nil {
			return &known.rec.Volume, err
		}
	}
	unlock, err := b.locks.lock(ctx, t.key())
	if err != nil {
		return nil, err
	}
	defer unlock()
	known := b.entry(t.key())
	if known == nil {
		return nil, b.cleanUnknown(ctx, t)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	return &known.rec.Volume, b.undo(ctx, known.rec, t)
}

// refuseUsed keeps a device from being given away while a sandbox has it: by the
// handler's word, and where this node's kernel mounts it, by the kernel's too.
func (b *Broker) refuseUsed(ctx context.Context, rec *record) error {
	if err := b.refuseBound(ctx, &rec.Volume); err != nil {
		return err
	}
	return b.claims.waitUnmounted(ctx, rec)
}

// refuseBound keeps a device from being given away while a sandbox writes to it.
func (b *Broker) refuseBound(ctx context.Context, v *Volume) error {
	handler := b.handlers[v.Handler]
	if handler == nil {
		return nil
	}
	sandbox, err := handler.InUse(ctx, v)
	if err != nil {
		return err
	}
	if sandbox != "" {
		return Errorf(Busy, "volume %s: the sandbox %s still has its device %s: repeat when the sandbox has ended",
			v.Target, sandbox, v.Device.Path)
	}
	return nil
}

// cleanUnknown removes what a volume whose record was lost may have left.
func (b *Broker) cleanUnknown(ctx context.Context, t *target) error {
	lost := &Volume{Key: t.key(), Target: t.given, ResolvedTarget: t.resolved}
	for _, handler := range b.handlers {
		if err := handler.Retract(ctx, lost); err != nil {
			return err
		}
	}
	if err := b.guards.remove(t, false); err != nil {
		return err
	}
	return b.forgetNewer(t.key())
}

// forgetNewer removes a record that only a newer daemon understands, of a volume
// that was given back: else the newer one would put it in place again.
func (b *Broker) forgetNewer(key Key) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.newer[key] {
		return nil
	}
	if err := b.store.drop(key); err != nil {
		return err
	}
	delete(b.newer, key)
	return nil
}

// undo takes a volume back, in the opposite order of publish. Once begun, a
// restart ends it. The target is resolved anew where it is nil.
func (b *Broker) undo(ctx context.Context, rec *record, t *target) error {
	err := b.undoSteps(ctx, rec, t)
	if err != nil {
		b.markRemoving(rec.Key, err)
		return err
	}
	b.forget(rec.Key)
	return nil
}

func (b *Broker) undoSteps(ctx context.Context, rec *record, t *target) error {
	if err := b.store.beginRemoval(rec.Key); err != nil {
		return err
	}
	b.markRemoving(rec.Key, nil)
	failpoint.Hit("unstage-begun")
	if handler := b.handlers[rec.Handler]; handler != nil {
		if err := handler.Retract(ctx, &rec.Volume); err != nil {
			return err
		}
	}
	failpoint.Hit("unstage-retracted")
	if err := b.unguard(rec, t); err != nil {
		return err
	}
	failpoint.Hit("unstage-unguarded")
	if err := b.claims.putBack(rec); err != nil {
		return err
	}
	failpoint.Hit("unstage-put-back")
	// The claim goes before the record: while the record stands a restart knows
	// that there may be a kept claim to give up.
	if err := b.claims.release(rec.Key); err != nil {
		return err
	}
	failpoint.Hit("unstage-released")
	return b.store.endRemoval(rec.Key)
}

// unguard removes the guard, and the target directory where we made it.
func (b *Broker) unguard(rec *record, t *target) error {
	if t == nil {
		resolved, err := b.targets.resolve(rec.ResolvedTarget)
		if KindOf(err) == Invalid && err != nil {
			return nil // below another kubelet root: not ours to reach any more
		}
		if err != nil {
			return err
		}
		defer resolved.close()
		t = resolved
	}
	return b.guards.remove(t, rec.MadeTarget)
}
