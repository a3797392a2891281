package claim

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim/internal/holders"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Held is a device that is to be released or claimed, or was released by force,
// and that some process of this node still has open.
type Held struct {
	Volume *volume.Volume
	// Processes names some of them, such as: process 4711 ("qemu-system-x86_64").
	Processes string
	Since     time.Time
}

// Users finds the processes that use a device. It relies on the kernel alone: what a
// handler or a container runtime knows of sandboxes proves nothing about a VMM that
// outlived its shim.
type Users struct {
	scan    *holders.Scanner
	servers func() []string
	changed func(volume.Key)

	mu   sync.Mutex
	held map[volume.Key]Held
}

// NewUsers makes a finder. Processes of the programs that servers returns do not count.
// It calls changed when the held device of a volume changes.
func NewUsers(servers func() []string, changed func(volume.Key)) *Users {
	return &Users{scan: holders.New(), servers: servers, changed: changed, held: make(map[volume.Key]Held)}
}

// maxHeld bounds how many held devices are listed; refusals do not depend on it.
const maxHeld = 1024

// releaseTime bounds the wait for a VMM that is ending.
const releaseTime = 2 * time.Second

// Refuse fails while a process has the volume's device open. It waits a short time for a
// VMM that is ending.
func (u *Users) Refuse(ctx context.Context, v *volume.Volume) error {
	return u.refuse(ctx, v, releaseTime)
}

// Note checks once which processes have the volume's device open, for Get and All.
func (u *Users) Note(ctx context.Context, v *volume.Volume) { _ = u.refuse(ctx, v, 0) }

// refuse is Refuse with a bound on the wait.
func (u *Users) refuse(ctx context.Context, v *volume.Volume, patience time.Duration) error {
	files, err := dataOf(v.Device)
	var found []holders.Holder
	if err == nil {
		found, err = u.await(ctx, files, patience)
	}
	switch {
	case err != nil:
		u.remember(v, "a process that cannot be examined")
		return unprovenError(v, err)
	case len(found) > 0:
		names := nameAll(found)
		u.remember(v, names)
		return volume.Errorf(volume.Busy, "volume %s: its device %s (%s) is open in %s: "+volume.TextEndVM,
			v.Target, v.Device.Path, v.Device, names)
	}
	u.clear(v.Key)
	return nil
}

// refuseLoops fails while a process has another loop device over the data of the
// volume's device open: it can change them.
func (u *Users) refuseLoops(ctx context.Context, v *volume.Volume, others []loopDevice) error {
	for _, other := range others {
		found, err := u.await(ctx, []identity{identityOf(other.Device)}, momentTime)
		if err != nil {
			return unprovenError(v, err)
		}
		if len(found) > 0 {
			return volume.Errorf(volume.InUse, "volume %s: what its device %s holds is in use by %s too, which is open in %s: "+
				"end that process, and detach that device", v.Target, v.Device.Path, other.Path, nameAll(found))
		}
	}
	return nil
}

func unprovenError(v *volume.Volume, err error) error {
	return volume.Errorf(volume.Busy, "volume %s: it cannot be proven that no process has its device %s (%s) open: %w: "+
		"put that right and repeat, or see `crustctl release`", v.Target, v.Device.Path, v.Device, err)
}

// await lists the processes that have one of the files open. It waits at most patience
// for them to end.
func (u *Users) await(ctx context.Context, files []identity, patience time.Duration) (found []holders.Holder, err error) {
	deadline := time.Now().Add(patience)
	for pause := 5 * time.Millisecond; ; pause *= 2 {
		found, err = u.find(ctx, files)
		if len(found) == 0 || time.Now().After(deadline) || !sys.Sleep(ctx, pause) {
			return found, err
		}
	}
}

// find lists the processes that have one of the files open, without the servers of
// devices.
func (u *Users) find(ctx context.Context, files []identity) ([]holders.Holder, error) {
	return u.scan.Find(ctx, u.servers(), files...)
}

func nameAll(found []holders.Holder) string {
	const most = 3
	names := make([]string, 0, most)
	for _, h := range found[:min(most, len(found))] {
		names = append(names, h.String())
	}
	if more := len(found) - most; more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	return strings.Join(names, ", ")
}

func (u *Users) remember(v *volume.Volume, processes string) {
	u.mu.Lock()
	before, known := u.held[v.Key]
	if known || len(u.held) < maxHeld {
		since := time.Now()
		if known {
			since = before.Since
		}
		u.held[v.Key] = Held{Volume: v, Processes: processes, Since: since}
	}
	u.mu.Unlock()
	if before.Processes != processes {
		u.changed(v.Key)
	}
}

func (u *Users) clear(key volume.Key) {
	u.mu.Lock()
	_, known := u.held[key]
	delete(u.held, key)
	u.mu.Unlock()
	if known {
		u.changed(key)
	}
}

// Get returns the held device of a volume, or nil.
func (u *Users) Get(key volume.Key) *Held {
	u.mu.Lock()
	defer u.mu.Unlock()
	if held, ok := u.held[key]; ok {
		return &held
	}
	return nil
}

// All lists the held devices, ordered by target.
func (u *Users) All() []Held {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.SortedFunc(maps.Values(u.held), func(x, y Held) int { return cmp.Compare(x.Volume.Target, y.Volume.Target) })
}

// Refresh checks again which processes have the held devices open.
func (u *Users) Refresh(ctx context.Context) {
	known := u.All()
	files, unread := make([][]identity, len(known)), make([]error, len(known))
	for i, held := range known {
		files[i], unread[i] = dataOf(held.Volume.Device)
	}
	if len(known) == 0 {
		return
	}
	found, err := u.find(ctx, slices.Concat(files...))
	for i, held := range known {
		still := slices.DeleteFunc(slices.Clone(found), func(h holders.Holder) bool { return !slices.Contains(files[i], h.File) })
		switch {
		case len(still) > 0:
			u.remember(held.Volume, nameAll(still))
		case err == nil && unread[i] == nil:
			u.clear(held.Volume.Key)
		}
	}
}

// Blind returns why it cannot be seen which processes have a device open, or nil. While
// it returns an error, nothing is claimed or released.
func (u *Users) Blind() error { return u.scan.Blind() }
