package kata

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/projection"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// maxNoted bounds the recorded sandboxes of one volume.
	maxNoted = 64
	// maxNoteFiles bounds a listing of all of them.
	maxNoteFiles = 1 << 20
)

// notes record which sandboxes were seen to have a volume, until the volume is retracted.
// They survive a restart and the loss of the volume's directory. Without them, a sandbox of
// runtime-rs, which leaves no id file, would be forgotten at a restart.
//
// Each is an empty file, <key>.<sandbox id>, in a directory of our own: Kata takes every file in its volumes'
// directories for a sandbox id. An empty file is made atomically, even on a filesystem without a free block.
type notes struct {
	dir string
	log *zap.Logger

	mu  sync.Mutex
	ids map[volume.Key][]string
	// unordered are the volumes whose sandboxes were read from files: which one is the last is not known, because the
	// node's clock may have been set back between two of them. Of others the last is the newest.
	unordered map[volume.Key]bool
}

func openNotes(dir string, log *zap.Logger) (*notes, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, volume.Errorf(volume.DiskKind(err), "kata: the directory %s cannot be made: %w", dir, err)
	}
	names, err := projection.ReadNames(dir, maxNoteFiles)
	if err != nil {
		return nil, volume.Errorf(volume.Internal, "kata: the directory %s cannot be read: %w", dir, err)
	}
	n := &notes{dir: dir, log: log, ids: make(map[volume.Key][]string), unordered: make(map[volume.Key]bool)}
	for _, name := range names {
		if key, id, ok := strings.Cut(name, "."); ok && abi.IsSandboxID(id) {
			n.ids[volume.Key(key)], n.unordered[volume.Key(key)] = append(n.ids[volume.Key(key)], id), true
		}
	}
	return n, nil
}

func (n *notes) file(key volume.Key, id string) string {
	return filepath.Join(n.dir, string(key)+"."+id)
}

func (n *notes) of(key volume.Key) []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.ids[key])
}

// last returns those of several sandboxes that may be the last.
func (n *notes) last(key volume.Key) []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	ids := slices.Clone(n.ids[key])
	switch {
	case len(ids) < 2:
		return nil
	case n.unordered[key]:
		return ids
	}
	return ids[len(ids)-1:]
}

func (n *notes) all() map[volume.Key][]string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return maps.Clone(n.ids)
}

// add records a sandbox. Those that have ended stay: a VM of theirs may have outlived them. Only where a pod that never
// starts would leave too many, they are dropped.
func (n *notes) add(key volume.Key, id string, ended func(id string) bool) {
	others := n.of(key)
	if slices.Contains(others, id) {
		return
	}
	if len(others) >= maxNoted {
		n.dropEnded(key, ended)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if slices.Contains(n.ids[key], id) {
		return
	}
	if len(n.ids[key]) >= maxNoted {
		n.log.Warn("too many sandboxes have one volume; one more is not recorded",
			zap.String("volume", string(key)), zap.String("sandbox", id))
		return
	}
	n.ids[key] = append(n.ids[key], id)
	delete(n.unordered, key)
	fd, err := unix.Open(n.file(key, id), unix.O_CREAT|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err == nil {
		err = unix.Close(fd)
	}
	if err != nil {
		n.log.Error("a sandbox that has a volume cannot be recorded: it may be forgotten at the next restart",
			zap.String("volume", string(key)), zap.String("sandbox", id), zap.Error(err))
	}
}

func (n *notes) dropEnded(key volume.Key, ended func(id string) bool) {
	for _, id := range n.of(key) {
		if ended(id) {
			n.drop(key, id)
		}
	}
}

func (n *notes) drop(key volume.Key, id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.remove(key, id); err == nil { // else it is dropped with the volume
		n.ids[key] = slices.DeleteFunc(n.ids[key], func(one string) bool { return one == id })
	}
}

func (n *notes) forget(key volume.Key) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, id := range n.ids[key] {
		if err := n.remove(key, id); err != nil {
			return volume.Errorf(volume.Internal, "volume %s: its record of sandbox %s cannot be removed below %s: %w",
				key.Short(), id, n.dir, err)
		}
	}
	delete(n.ids, key)
	delete(n.unordered, key)
	return nil
}

func (n *notes) remove(key volume.Key, id string) error {
	return sys.UnlessMissing(unix.Unlink(n.file(key, id)))
}
