package deferral

import (
	"cmp"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Status is a volume and its state.
type Status struct {
	*volume.Volume
	// Removing is set while the volume is being removed.
	Removing bool
	// Leaving is set if the volume was to be released, and that was refused because of Problem.
	Leaving bool
	// Problem is what is wrong with the volume, or nil; ProblemSince is when it was seen first.
	Problem      error
	ProblemSince time.Time
	// Refused is set for a volume that could not be deferred: it is not on record.
	Refused bool
	// Held is set while a process has the device open and so keeps it from being released or claimed.
	Held *claim.Held
	// OffRecord is set for a volume that is known only because its device is held: it was
	// released by force, its record was lost, or it could not be deferred.
	OffRecord bool
}

// HeldStatus is the status of a held device whose volume is not on record.
func HeldStatus(h claim.Held) Status { return Status{Volume: h.Volume, Held: &h, OffRecord: true} }

// Get returns a volume by its key.
func (b *Broker) Get(key volume.Key) (Status, bool) {
	known := b.table.get(key)
	if known == nil {
		return Status{}, false
	}
	return b.table.status(known, b.users.Get(key)), true
}

// KeyOfTarget resolves a target path to its key.
func (b *Broker) KeyOfTarget(targetPath string) (volume.Key, error) {
	t, err := b.targets.root.Resolve(targetPath)
	if err != nil {
		return "", err
	}
	defer t.Close()
	return t.Key, nil
}

// Each yields all volumes, ordered by target.
func (b *Broker) Each() iter.Seq[Status] {
	return func(yield func(Status) bool) {
		for _, known := range b.table.all() {
			if !yield(b.table.status(known, b.users.Get(known.rec.Key))) {
				return
			}
		}
	}
}

// After returns the first volumes behind another one in that order. The other one need not exist.
func (b *Broker) After(other Status, most int) []Status {
	return b.statuses(b.table.after(other.Target, other.Key, most))
}

func (b *Broker) statuses(all []*entry) []Status {
	out := make([]Status, 0, len(all))
	for _, known := range all {
		out = append(out, b.table.status(known, b.users.Get(known.rec.Key)))
	}
	return out
}

// OfOrigin returns the deferred volumes of one volume of a driver: one for each target that it is published on.
func (b *Broker) OfOrigin(driver, volumeID string) []Status {
	return b.statuses(b.table.ofOrigin(origin{driver, volumeID}))
}

// Lost returns the volumes without a usable record: which volumes of a driver they are is not known.
func (b *Broker) Lost() []Status { return b.statuses(b.table.allLost()) }

// SortByTarget orders volumes by their targets.
func SortByTarget(all []Status) { slices.SortFunc(all, ByTarget) }

// ByTarget compares volumes by their targets, and by keys where other programs name one target for several volumes.
func ByTarget(x, y Status) int {
	return cmp.Or(strings.Compare(x.Target, y.Target), strings.Compare(string(x.Key), string(y.Key)))
}

// Problems are the records that cannot be used, and other files among them.
func (b *Broker) Problems() []error { return b.table.allProblems() }

// Abilities are those of a configured handler; an empty name is the default one.
func (b *Broker) Abilities(handler string) Abilities {
	return b.handlers.abilities(cmp.Or(handler, b.handlers.byDefault))
}

// Users returns what is known about the processes that have devices open.
func (b *Broker) Users() Users { return Users{of: b.users, orphans: b.orphans} }

// Users are the processes that have devices open, as far as the broker has asked for them.
type Users struct {
	of      *claim.Users
	orphans *orphans
}

// Held lists the devices that are to be released or claimed, or were released by force,
// and that some process still has open.
func (u Users) Held() []claim.Held { return u.of.All() }

// OffRecord finds one of them by its key.
func (u Users) OffRecord(key volume.Key) (Status, bool) {
	if held := u.of.Get(key); held != nil {
		return HeldStatus(*held), true
	}
	return Status{}, false
}

// KeptClaims counts the claims that the keeper holds over a restart.
func (b *Broker) KeptClaims() int { return b.claims.Kept() }

// DeviceSize returns the current size of a volume's device in bytes.
func (b *Broker) DeviceSize(v *volume.Volume) (int64, bool) { return claim.DeviceSize(v.Device) }
