package kata

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/projection"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// flavor tells Kata's two runtimes apart.
type flavor string

const (
	goShim   flavor = "kata-go"
	rustShim flavor = "kata-rs"
)

type shim struct {
	id     string // of the sandbox
	flavor flavor
}

// bindings finds out which sandbox has a volume and which is alive, by the container runtime's list and the sockets of
// Kata's shims. It records every sandbox that may have had a volume.
type bindings struct {
	cfg       *Config
	layout    layout
	store     *projection.Store
	table     *projection.Bindings
	notes     *notes
	sandboxes Sandboxes // nil where no container runtime is followed
}

// current returns the shim to ask about the volume, from memory; its id is "" for none.
func (b *bindings) current(v *volume.Volume) shim {
	e, _ := b.table.Get(v.Key)
	return shim{id: e.Live.Sandbox, flavor: flavor(e.Live.Runtime)}
}

// propose sets the sandbox to ask about the volume. If that is adopted and not tracked, its program has removed it
// since the call began, and nobody would forget it again.
func (b *bindings) propose(v *volume.Volume, s shim) {
	if _, tracked := b.table.Get(v.Key); !tracked && !v.Adopted {
		b.table.Track(projection.Entry{Volume: v, Owner: projection.OwnedByUs})
	}
	b.noteUse(v.Key, s.id)
	b.table.Propose(v.Key, s.id, string(s.flavor))
}

// seen records a sandbox-id file. Its sandbox counts as one that has the volume until shown
// otherwise, unless nobody listens for it: id files stay when sandboxes end.
func (b *bindings) seen(key volume.Key, id string) {
	e, tracked := b.table.Get(key)
	if !tracked || !b.mayHave(id, e.Volume.PodUID) {
		return
	}
	b.noteUse(key, id)
	if lives, err := b.mayLive(id); err == nil && !lives {
		b.table.Propose(key, id, string(b.guessFlavor(id)))
		return
	}
	b.table.Bind(key, id, string(b.guessFlavor(id)))
}

// guessFlavor guesses the runtime of a sandbox that was not asked yet, by its socket.
func (b *bindings) guessFlavor(id string) flavor {
	var st unix.Stat_t
	if unix.Lstat(b.cfg.socketOf(id, goShim), &st) != nil && unix.Lstat(b.cfg.socketOf(id, rustShim), &st) == nil {
		return rustShim
	}
	return goShim
}

// added records a new sandbox of a pod, and unbinds the pod's volumes from older ones.
func (b *bindings) added(podUID, id string) {
	if podUID == "" || !abi.IsSandboxID(id) {
		return
	}
	for _, key := range b.table.DropOthers(podUID, id) {
		b.noteUse(key, id)
	}
}

func (b *bindings) noteUse(key volume.Key, id string) {
	if b.table.IsOurs(key) {
		b.notes.add(key, id, b.ended)
	}
}

// candidates lists the sandboxes that may have the volume, the likeliest first: those that left their id in its
// directory, those of its pod, then those that had it before. With an error, those of the directory are missing.
func (b *bindings) candidates(v *volume.Volume) (ids []string, err error) {
	if dir, ok := b.layout.DirOf(v); ok {
		ids, err = b.layout.Sandboxes(dir)
	}
	if b.sandboxes != nil && v.PodUID != "" {
		ids = append(ids, b.sandboxes.OfPod(v.PodUID)...)
	}
	ids = append(ids, b.notes.of(v.Key)...)
	seen := make(map[string]bool, len(ids))
	return slices.DeleteFunc(ids, func(id string) bool {
		again := seen[id]
		seen[id] = true
		return again || !b.mayHave(id, v.PodUID)
	}), err
}
