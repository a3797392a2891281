package claim

import (
	"cmp"
	"context"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Openers answers who has a device open besides this process; *openers.Finder does.
type Openers interface {
	Await(ctx context.Context, q openers.Query, patience time.Duration) (openers.Users, error)
	Holders(ctx context.Context, q openers.Query) ([]openers.Holder, error)
	OpenProcess(of openers.Holder) (*openers.Process, error)
	Mark(fd int) openers.Mark
	AwaitClosed(ctx context.Context, m openers.Mark, patience time.Duration) (known bool)
	Layers(file openers.File, fd int) ([]openers.File, error)
}

// Held is a device that is to be released or claimed, or was released by force, and that somebody else still has open.
type Held struct {
	Volume *volume.Volume
	// Processes names some of those who have it, such as: process 4711 ("qemu-system-x86_64").
	Processes string
	Since     time.Time
	// Forced is set for a device that was released by force.
	Forced bool
	// Sequence tells the device from a later one with the same number; "" is not known.
	Sequence string
	wanted   time.Time // when a call was last refused because of it
}

// HeldError is part of the error for a device that others have open.
type HeldError struct{ By openers.Users }

func (e *HeldError) Error() string { return "open in " + e.By.Names }

// Users asks who uses a device, and remembers the held devices. It relies on the kernel alone: what a handler or a
// container runtime knows of sandboxes proves nothing about a VMM that outlived its shim.
type Users struct {
	openers Openers
	servers func() []string
	changed func(volume.Key)

	mu   sync.Mutex
	held map[volume.Key]Held
	// forced are the devices that were released by force, until nobody has them. Freed is called then.
	forced map[forcedKey]Held
	freed  func(*volume.Volume)
}

// serversOf returns the programs whose opens of a device do not count, because they are the device. What else they
// have open holds the data of one: nobody serves an image or a loop device, and a program for nbd serves nothing else.
func (u *Users) serversOf(id identity) []string {
	const nbdMajor = 43 // NBD_MAJOR of the kernel's <linux/major.h>
	switch {
	case !id.Block || openers.IsLoop(id):
		return nil
	case id.Major == nbdMajor:
		return u.servers()
	}
	return slices.DeleteFunc(slices.Clone(u.servers()), func(program string) bool { return strings.Contains(program, "nbd") })
}

// forcedKey is a device and its volume: several read-only ones may have had it.
type forcedKey struct {
	device identity
	volume volume.Key
}

func forcedKeyOf(v *volume.Volume) forcedKey { return forcedKey{identityOf(v.Device), v.Key} }

// NewUsers makes Users. Processes of the programs that servers returns do not count. It calls changed
// when the held device of a volume changes.
func NewUsers(finder Openers, servers func() []string, changed func(volume.Key)) *Users {
	return &Users{openers: finder, servers: servers, changed: changed, held: make(map[volume.Key]Held), forced: make(map[forcedKey]Held)}
}

// Force remembers a device that is released by force until no process has it open. Then it calls freed,
// without a lock. freed must be the same function in all calls.
func (u *Users) Force(h Held, freed func(*volume.Volume)) {
	h.Processes, h.Forced = unknownOpener, true
	u.mu.Lock()
	if before, known := u.held[h.Volume.Key]; known && before.Volume.Device.Same(h.Volume.Device) {
		h.Processes = before.Processes
		delete(u.held, h.Volume.Key)
	}
	u.forced[forcedKeyOf(h.Volume)], u.freed = h, freed
	u.mu.Unlock()
	u.changed(h.Volume.Key)
}

// SequenceOf returns the kernel's serial number of what a block device number stands for now, such as one
// attachment of a loop device. It is "" for an image, and where the kernel has none.
func SequenceOf(d volume.Device) string {
	if d.Kind != volume.BlockDevice {
		return ""
	}
	dir := blockDevices + openers.Number(d.Major, d.Minor)
	line, err := sys.ReadLine(dir + "/diskseq")
	if err != nil {
		line, _ = sys.ReadLine(dir + "/../diskseq") // of a partition's disk
	}
	return line
}

// Forced lists the devices that were released by force.
func (u *Users) Forced() []Held {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Collect(maps.Values(u.forced))
}

// unknownOpener stands for who has a device open while that is not known.
const unknownOpener = "an opener that is not known"

// maxHeld bounds how many held devices are listed; refusals do not depend on it.
const maxHeld = 1024

// refuse returns the error for a volume whose device others have open, or nil if there are none, and remembers them.
func (u *Users) refuse(r Request, others openers.Users, err error) error {
	switch {
	case err != nil:
		u.remember(r, unknownOpener)
		return unprovenError(r.Volume, err)
	case others.Names != "":
		u.remember(r, others.Names)
		return volume.Errorf(volume.Busy, "volume %s: its device %s (%s) is %w",
			r.Target, r.Device.Path, r.Device, &HeldError{others})
	}
	u.clear(r.Volume)
	return nil
}

// ofKept returns who else has the device of a kept descriptor open.
func (u *Users) ofKept(ctx context.Context, file *os.File, patience time.Duration) (openers.Users, error) {
	return u.openers.Await(ctx, openers.Query{FD: int(file.Fd()), Own: 1, Claimed: true, Servers: u.serversOf(fileOf(file))}, patience)
}

func unprovenError(v *volume.Volume, err error) error {
	return volume.Errorf(volume.Busy, "volume %s: it cannot be proven that no process has its device %s (%s) open: %w: "+
		"put that right and repeat, or see `crustctl release`", v.Target, v.Device.Path, v.Device, err)
}

func (u *Users) remember(r Request, processes string) {
	now, sequence := time.Now(), cmp.Or(r.Sequence, SequenceOf(r.Device))
	u.mu.Lock()
	before, known := u.held[r.Key]
	if forced, is := u.forced[forcedKeyOf(r.Volume)]; is {
		before, forced.Processes = forced, processes
		u.forced[forcedKeyOf(r.Volume)] = forced
	} else if known || len(u.held) < maxHeld {
		// A look by Refresh may end after a call that began later.
		wanted := slices.MaxFunc([]time.Time{before.wanted, cmp.Or(r.wanted, now)}, time.Time.Compare)
		u.held[r.Key] = Held{Volume: r.Volume, Processes: processes, Since: cmp.Or(before.Since, now), Sequence: sequence, wanted: wanted}
	}
	u.mu.Unlock()
	if before.Processes != processes {
		u.changed(r.Key)
	}
}

// clear forgets the device of a volume that no process has open, even if another volume released it by force.
func (u *Users) clear(v *volume.Volume) {
	for _, h := range u.Forced() {
		if identityOf(h.Volume.Device) == identityOf(v.Device) {
			u.free(h.Volume)
		}
	}
	u.Drop(v.Key)
}

// Drop forgets the held device of a volume alone.
func (u *Users) Drop(key volume.Key) {
	u.mu.Lock()
	_, known := u.held[key]
	delete(u.held, key)
	u.mu.Unlock()
	if known {
		u.changed(key)
	}
}

// free forgets a device that was released by force.
func (u *Users) free(v *volume.Volume) {
	u.mu.Lock()
	delete(u.forced, forcedKeyOf(v))
	freed := u.freed
	u.mu.Unlock()
	freed(v)
	u.changed(v.Key)
}

// Get returns the held device of a volume, or nil.
func (u *Users) Get(key volume.Key) *Held {
	u.mu.Lock()
	defer u.mu.Unlock()
	found, ok := u.held[key]
	for _, held := range u.forced {
		if !ok && held.Volume.Key == key {
			found, ok = held, true
		}
	}
	if !ok {
		return nil
	}
	held := found // as a rule there is none, and nothing is allocated
	return &held
}

// All lists the held devices, ordered by target.
func (u *Users) All() []Held {
	u.mu.Lock()
	defer u.mu.Unlock()
	all := slices.AppendSeq(slices.Collect(maps.Values(u.held)), maps.Values(u.forced))
	slices.SortFunc(all, func(x, y Held) int { return cmp.Compare(x.Volume.Target, y.Volume.Target) })
	return all
}
