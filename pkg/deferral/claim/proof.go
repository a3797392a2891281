package claim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// momentTime bounds the wait for somebody who has a device open only briefly, such as a program
	// that probes it. A refused caller tries again after half a second at best.
	momentTime = 500 * time.Millisecond
	// ReleaseTime bounds the wait for a VMM that is ending, and for the mounts of a sandbox that has
	// just ended: the kernel removes a mount namespace some time after its last process.
	ReleaseTime = 2 * time.Second
	// EndTime bounds the wait for a process that was killed: the kernel frees the memory of a VM first.
	EndTime = 10 * time.Second
)

// Holders lists the processes that have the volume's device open.
func (t *Table) Holders(ctx context.Context, r Request) ([]openers.Holder, error) {
	q, err := t.open.question(r.Device)
	if err != nil {
		return nil, err
	}
	defer sys.CloseAlone(q.FD)
	q.Beside, q.Servers = t.owners.beside(r.Key), t.users.serversOf(identityOf(r.Device))
	return t.users.openers.Holders(ctx, q)
}

// OpenHolders opens the processes that have the volume's device open. One that ends meanwhile has not. The caller closes them.
func (t *Table) OpenHolders(ctx context.Context, r Request) (all []*openers.Process, err error) {
	holders, err := t.Holders(ctx, r)
	for _, one := range holders {
		p, openErr := t.users.openers.OpenProcess(one)
		if openErr == nil {
			all = append(all, p)
		} else if !errors.Is(openErr, unix.ESRCH) {
			err = errors.Join(err, fmt.Errorf("%s: %w", one, openErr))
		}
	}
	return all, err
}

// RefuseUsed fails while anybody but this table has the volume's device open or mounted. It waits for those
// who are ending.
func (t *Table) RefuseUsed(ctx context.Context, r Request, patience time.Duration) error {
	if r.IsReplaced() && len(t.owners.owned(r.Key)) == 0 {
		t.users.Drop(r.Key)
		return nil // who has the number open uses the other device, which may be held for another volume
	}
	q, err := t.open.question(r.Device)
	if err != nil && isGone(r.Device, err) {
		t.users.clear(r.Volume)
		return nil // there is nothing to give away
	}
	if err != nil {
		return t.users.refuse(r, openers.Users{}, err)
	}
	defer sys.CloseAlone(q.FD)
	others, err := t.askOthers(ctx, r.Volume, q, patience)
	return t.users.refuse(r, others, err)
}

// askOthers asks who but this table has the device of the query open.
func (t *Table) askOthers(ctx context.Context, v *volume.Volume, q openers.Query, patience time.Duration) (openers.Users, error) {
	q.Beside, q.Servers = t.owners.beside(v.Key), t.users.serversOf(identityOf(v.Device))
	return t.users.openers.Await(ctx, q, patience)
}

// maxAsked bounds how many devices are asked about at once: those that are asked about together
// share a scan where the kernel's count is not to be had.
const maxAsked = 64

// heldKept is how long a held device is listed after a claim of it was refused. Who still wants it repeats that sooner.
const heldKept = 10 * time.Minute

// Refresh asks again who has the held devices of these volumes open.
func (t *Table) Refresh(ctx context.Context, of func(*volume.Volume) bool) {
	for _, h := range t.users.Forced() { // their numbers may belong to other devices by now
		if now := SequenceOf(h.Volume.Device); now != h.Sequence && now != "" {
			t.users.free(h.Volume)
		}
	}
	byDevice := make(map[identity][]Request) // two questions at once would count each other's descriptor
	for _, held := range t.users.All() {
		r := Request{Volume: held.Volume, Sequence: held.Sequence, wanted: held.wanted}
		if !held.Forced && time.Since(held.wanted) > heldKept && len(t.owners.owned(r.Key)) == 0 {
			t.users.Drop(r.Key) // nobody waits for it
		} else if of(held.Volume) {
			byDevice[identityOf(r.Device)] = append(byDevice[identityOf(r.Device)], r)
		}
	}
	var group errgroup.Group
	group.SetLimit(maxAsked)
	for id, requests := range byDevice {
		look(&group, &t.looks, id, func() {
			for _, r := range requests {
				_ = t.RefuseUsed(context.WithoutCancel(ctx), r, 0) // the list of held devices has it
			}
		})
	}
	_ = group.Wait() // none fails
}

// MostHung is how many volumes or devices may hang before no other is looked at. Each occupies a thread.
const MostHung = 256

// look runs see in the group, and leaves a device behind that hangs.
func look(group *errgroup.Group, all *sys.Looks[identity], id identity, see func()) {
	group.Go(func() error {
		_, _ = sys.Look(all, id, func() (struct{}, error) { see(); return struct{}{}, nil })
		return nil
	})
}

// DropKept closes the kept descriptors that no volume needs. It leaves those of the wanted devices,
// whose volumes may claim them later, and those of devices that somebody else has open, which a
// lost volume may have had. It also retries what an earlier release failed to close.
func (t *Table) DropKept(ctx context.Context, wanted []volume.Device) {
	var group errgroup.Group
	group.SetLimit(maxAsked)
	for _, id := range t.open.identities() {
		if len(t.owners.ofDevice(id)) > 0 {
			continue
		}
		look(&group, &t.looks, id, func() {
			unlock, free := t.devices.TryLock(id)
			if !free {
				return
			}
			defer unlock()
			if len(t.owners.ofDevice(id)) == 0 {
				_ = t.open.release(id) // the next call tries again
			}
		})
	}
	for name, file := range t.open.keptExcept(claimNames(wanted)) {
		look(&group, &t.looks, fileOf(file), func() {
			if who, err := t.users.ofKept(ctx, file, 0); err == nil && who.Names == "" {
				t.open.dropKept(name)
			}
		})
	}
	_ = group.Wait() // none fails
}

func fileOf(file *os.File) identity {
	var st unix.Stat_t
	_ = unix.Fstat(int(file.Fd()), &st) // it cannot fail: the file is open
	return openers.FileOf(&st)
}

// RefuseKept fails while somebody else has the device of a kept descriptor open, except for the
// known devices. It is for a volume whose device is not known: it may be that one.
func (t *Table) RefuseKept(ctx context.Context, v *volume.Volume, known []volume.Device) error {
	for _, file := range t.open.keptExcept(claimNames(known)) {
		who, err := t.users.ofKept(ctx, file, ReleaseTime)
		if err != nil {
			return volume.Errorf(volume.Busy, "volume %s: its device is not known, and it cannot be proven that nobody has it open: %w", v.Target, err)
		}
		if who.Names != "" {
			return volume.Errorf(volume.Busy, "volume %s: its device is not known, and may be %s, which is %w",
				v.Target, fileOf(file), &HeldError{who})
		}
	}
	return nil
}

func claimNames(devices []volume.Device) map[string]bool {
	names := make(map[string]bool, len(devices))
	for _, d := range devices {
		names[claimName(identityOf(d))] = true
	}
	return names
}
