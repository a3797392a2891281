package deferral

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/step"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// remover removes volumes, in the opposite order of their deferral.
type remover struct {
	boot     string
	targets  *targets
	store    *store
	claims   *claim.Table
	users    *claim.Users
	handlers *handlerSet
	table    *table
	orphans  *orphans
	observer Observer
}

// rollBack undoes a failed deferral and returns its cause. If that fails too, the error is
// one to retry: a final one would promise that nothing is left.
func (r *remover) rollBack(ctx context.Context, rec *record, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	r.table.add(rec)
	if err := r.undo(ctx, rec, nil, false); err != nil {
		return volume.Errorf(volume.Busy, "%w; and it could not be undone yet: %w", cause, err)
	}
	return cause
}

// refuseUsed returns an error while somebody uses the device: it asks the handler and the
// kernel. A sandbox can find the volume until it is retracted, so undo asks the kernel again. After a
// ForgottenError nobody has the device, and disown can find out more.
func (r *remover) refuseUsed(ctx context.Context, rec *record) error {
	ctx, end := step.Begin(ctx, "prove that nobody uses it")
	defer end()
	err := r.handlers.refuseBound(ctx, &rec.Volume)
	if err != nil && forgottenIn(err) == nil || r.claims.IsShared(rec.Device) {
		return err
	}
	return cmp.Or(r.refuseHeld(ctx, rec), err)
}

// refuseRelease is refuseUsed, and ends orphans if they block the release. It returns forgotten sandboxes
// that disown can examine. disown is not possible if the record is lost, because the projection could not be
// made again, nor for a shared device, because the kernel's count does not say which volume has it open.
func (r *remover) refuseRelease(ctx context.Context, known *entry) (*ForgottenError, error) {
	err := r.refuseUsed(ctx, known.rec)
	if err == nil {
		return nil, nil //nolint:nilnil // none is in the way
	}
	err = r.orphans.clear(ctx, known.rec, err)
	if of := forgottenIn(err); of != nil && known.lost == nil && !r.claims.IsShared(known.rec.Device) {
		return of, nil
	}
	return nil, err
}

// disownTime bounds disown, which holds the volume's lock.
const disownTime = 10 * time.Second

// disown proves that forgotten sandboxes have ended, even if their shims answer: after the projection is
// withdrawn, the container runtime still lists none of them and no process has the device open. The caller
// holds the volume's lock. On failure disown makes the projection again, and a restart does so too.
func (r *remover) disown(ctx context.Context, rec *record, of *ForgottenError) error {
	handler, able := r.handlers.tracking(&rec.Volume)
	if !able {
		return forgottenError(&rec.Volume, of)
	}
	asking, cancel := context.WithTimeout(ctx, disownTime)
	defer cancel()
	err := handler.Withdraw(asking, &rec.Volume)
	if err == nil {
		failpoint.Hit("unstage-withdrawn")
		err = handler.Disowned(asking, &rec.Volume, of.Sandboxes)
	}
	if err == nil {
		failpoint.Hit("unstage-disowned")
		err = r.refuseOthers(asking, rec, of)
	}
	if err != nil {
		_, restoring := r.handlers.byName[rec.Handler].Publish(context.WithoutCancel(ctx), &rec.Volume)
		return errors.Join(err, restoring) // reconcile tries again
	}
	return nil
}

// refuseOthers is refuseUsed for a volume whose forgotten sandboxes are known to have ended.
func (r *remover) refuseOthers(ctx context.Context, rec *record, ended *ForgottenError) error {
	err := r.refuseUsed(ctx, rec)
	of := forgottenIn(err)
	if of == nil || slices.ContainsFunc(of.Sandboxes, func(id string) bool { return !slices.Contains(ended.Sandboxes, id) }) {
		return err
	}
	return nil
}

// refuseHeld returns an error while anybody has the device mounted or open. Of several read-only volumes, the last one
// waits for the processes of all. No process of an earlier boot exists any more. If a lost volume's device is not
// known, it may be any that the keeper has kept for a volume without a record.
func (r *remover) refuseHeld(ctx context.Context, rec *record) error {
	if rec.Boot != r.boot {
		return nil
	}
	if rec.Device.Kind == "" {
		known, _ := r.table.claimed()
		return r.claims.RefuseKept(ctx, &rec.Volume, known)
	}
	return r.claims.RefuseUsed(ctx, rec.claim(), claim.ReleaseTime)
}

// cleanUnknown removes what a volume without a record may have left. It touches no other filesystem on the target than
// one that can be a guard: the server of a volume that its driver mounted may not answer any more.
func (r *remover) cleanUnknown(ctx context.Context, t *guard.Target) error {
	lost := r.targets.volume(t)
	for _, handler := range r.handlers.byName {
		if err := handler.Retract(ctx, lost); err != nil {
			return err
		}
	}
	on, err := sys.TypeAt(t.Resolved)
	if err != nil {
		return volume.Errorf(volume.Busy, "volume %s: it is not known what is mounted on it: %w", t.Given, err)
	}
	if on != "tmpfs" {
		return nil
	}
	return t.Remove(false)
}

// undo removes a volume. If it fails, or the daemon is killed, the next start or call
// continues. A nil target is resolved again. Unless it is forced, the last volume's undo
// fails while the device is mounted, or a process has it open.
func (r *remover) undo(ctx context.Context, rec *record, t *guard.Target, force bool) error {
	if err := r.steps(ctx, rec, t, force); err != nil {
		r.table.markRemoving(rec.Key, err)
		return err
	}
	r.table.remove(rec.Key)
	return nil
}

// undoAsked is undo of a volume whose release was asked for: it ends the orphans in its way, such as one
// that had found the volume before the removal began.
func (r *remover) undoAsked(ctx context.Context, rec *record, t *guard.Target) error {
	err := r.undo(ctx, rec, t, false)
	if err == nil {
		return nil
	}
	if err = r.orphans.clear(ctx, rec, err); err != nil {
		return err
	}
	return r.undo(ctx, rec, t, false)
}

func (r *remover) steps(ctx context.Context, rec *record, t *guard.Target, force bool) error {
	if err := r.store.beginRemoval(rec.Key); err != nil {
		return err
	}
	r.table.markRemoving(rec.Key, nil)
	failpoint.Hit("unstage-begun")
	if err := r.handlers.withdraw(ctx, &rec.Volume, force); err != nil {
		return err
	}
	failpoint.Hit("unstage-retracted")
	if err := r.unguard(rec, t); err != nil {
		return err
	}
	failpoint.Hit("unstage-unguarded")
	// Release the claim before the record: while the record exists, a restart knows
	// that there may be a kept claim to give up.
	request := rec.claim()
	request.WasReadOnly = request.WasReadOnly || rec.Boot != r.boot // another device may have the number by now
	err := r.claims.Release(request, func(last bool) (err error) {
		if last && !force {
			err = r.refuseHeld(ctx, rec)
		}
		if err == nil && rec.Boot == r.boot && !request.IsReplaced() { // else another device may have the number
			r.observer.Leaving(&rec.Volume)
		}
		return err
	})
	if err != nil {
		return err
	}
	failpoint.Hit("unstage-released")
	if err := r.handlers.forget(ctx, &rec.Volume); err != nil {
		return err
	}
	return r.store.endRemoval(rec.Key)
}

// unguard removes the guard, and the target directory if we made it.
func (r *remover) unguard(rec *record, t *guard.Target) error {
	if t == nil {
		resolved, err := r.targets.ofRecord(rec)
		if volume.KindOf(err) == volume.Invalid && err != nil {
			return nil // below another root: not ours to reach any more
		}
		if err != nil {
			return err
		}
		defer resolved.Close()
		t = resolved
	}
	return r.targets.remove(t, rec.MadeTarget)
}

func (r *remover) noteForced(rec *record) error {
	if rec.Device.Kind == "" {
		return nil // it is not known
	}
	h := claim.Held{Volume: &rec.Volume, Sequence: cmp.Or(rec.Sequence, claim.SequenceOf(rec.Device)), Since: time.Now().UTC()}
	if err := r.store.putHeld(h, r.boot); err != nil {
		return err
	}
	r.users.Force(h, r.store.dropHeld)
	return nil
}
