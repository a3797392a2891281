package driver

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// store keeps one file for each volume, named by a hash of the volume's id.
type store struct {
	dir   string
	spare *spare
}

func fileName(id string) string {
	sum := sha256.Sum256([]byte(id))
	return hex.EncodeToString(sum[:])
}

func (s store) path(id string) string { return filepath.Join(s.dir, fileName(nameOf(id))+".json") }

// newID returns the id of a snapshot, or of a group, with a name. It is never used again: backup software would take a
// snapshot that is made anew under a name for the one before it.
func newID(kind, name string) string { return kind + fileName(name)[:32] + "." + rand.Text() }

var randomPart = regexp.MustCompile(`^((?:snap|group)-[0-9a-f]{32})\.[0-9A-Z]{26}`)

// nameOf returns an id without its random part, which those of earlier versions lack. Of all ids with one name at most
// one exists: they share a record and a lock.
func nameOf(id string) string { return randomPart.ReplaceAllString(id, "$1") }

// load returns nil if there is no such volume.
func (s store) load(id string) (*record, error) {
	r, err := s.named(id)
	if r != nil && r.ID != id {
		return nil, nil
	}
	return r, err
}

// named is load for any id with the same name.
func (s store) named(id string) (*record, error) {
	r, err := read(s.path(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil && nameOf(r.ID) != nameOf(id) {
		return nil, fmt.Errorf("the record of volume %q is one of %q", id, r.ID)
	}
	return r, err
}

// existing returns the record of what an earlier call has made for the name of an id, or nil. What was made or removed
// only in part is erased, with the data that is in it.
func (s store) existing(id string, erase func(*record) error) (*record, error) {
	r, err := s.named(id)
	if err != nil || r == nil || r.Ready {
		return r, err
	}
	return nil, erase(r)
}

func read(path string) (*record, error) {
	raw, err := os.ReadFile(path) //nolint:gosec // below the data directory, by a hash
	if err != nil {
		return nil, err
	}
	r := &record{}
	if err := json.Unmarshal(raw, r); err != nil {
		return nil, fmt.Errorf("record %s: %w", path, err)
	}
	if r.Version != recordVersion || r.ID == "" || r.Capacity <= 0 {
		return nil, fmt.Errorf("record %s: version %d is not known, or it has no id or capacity", path, r.Version)
	}
	return r, nil
}

// list returns all records, sorted by id, and the errors of those that cannot be read.
func (s store) list() ([]*record, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, err
	}
	var all []*record
	var bad []error
	for _, entry := range entries {
		if !strings.HasSuffix(entry.Name(), ".json") {
			continue
		}
		r, err := read(filepath.Join(s.dir, entry.Name()))
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			bad = append(bad, err)
		default:
			all = append(all, r)
		}
	}
	slices.SortFunc(all, func(a, b *record) int { return cmp.Compare(a.ID, b.ID) })
	return all, errors.Join(bad...)
}

// save replaces the record. The caller holds its lock, or that of the group that it belongs to, without which nobody
// writes it. On a full disk a record that is there can still be replaced.
func (s store) save(r *record) error {
	raw, err := json.Marshal(r)
	failpoint.Hit("driver-recording")
	if err == nil {
		err = sys.WriteSynced(s.path(r.ID), raw)
	}
	if volume.DiskKind(err) == volume.Exhausted && s.spare.replace(s.path(r.ID), raw) == nil {
		err = sys.SyncDir(s.dir)
	}
	if err != nil {
		return fmt.Errorf("write the record of volume %q: %w", r.ID, err)
	}
	return nil
}

// spare is a file that has its room on the disk already. Without it no pod could leave a
// full disk, and so none of the volumes that fill it could be deleted.
type spare struct {
	mu   sync.Mutex
	path string
}

// openSpare makes the file; on a disk that is full already, there may be none.
func openSpare(path string) (*spare, error) {
	info, err := os.Stat(path)
	if err == nil && info.Size() > 0 {
		return &spare{path: path}, nil
	}
	err = os.WriteFile(path, make([]byte, 4096), 0o600) // a block of most filesystems, and more than most records have
	if volume.DiskKind(err) == volume.Exhausted {
		err = nil
	}
	return &spare{path: path}, err
}

// replace writes a record into the spare and exchanges the two files. It fails where there is no old record.
func (s *spare) replace(path string, raw []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	file, err := os.OpenFile(s.path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	// What is longer is overwritten by spaces, with which JSON may end: a file that is cut would lose its room.
	info, err := file.Stat()
	if err == nil {
		_, err = file.WriteAt(append(raw, bytes.Repeat([]byte{' '}, max(0, int(info.Size())-len(raw)))...), 0)
	}
	if err = errors.Join(err, file.Sync(), file.Close()); err != nil {
		return err
	}
	return unix.Renameat2(unix.AT_FDCWD, s.path, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE)
}

// unready records that a volume is about to be removed. A full disk may have no room for the record, and the removal
// makes some, so it goes on. If the driver is killed then, the removal has to be repeated.
func (s store) unready(r *record) error {
	if !r.Ready {
		return nil // the record on the disk says so already
	}
	r.Ready = false
	if err := s.save(r); !errors.Is(err, unix.ENOSPC) {
		return err
	}
	return nil
}

func (s store) remove(id string) error {
	if err := os.Remove(s.path(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return sys.SyncDir(s.dir)
}

// clean removes the temporary files of a driver that was killed.
func (s store) clean() error {
	left, err := filepath.Glob(filepath.Join(s.dir, "*.new")) // of sys.WriteSynced
	earlier, _ := filepath.Glob(filepath.Join(s.dir, ".new-*"))
	for _, path := range append(left, earlier...) {
		err = errors.Join(err, os.Remove(path))
	}
	return err
}

// record is the record of a volume, a snapshot or a group of snapshots.
type record struct {
	Version  int       `json:"version"`
	ID       string    `json:"id"`
	Capacity int64     `json:"capacity"`
	Created  time.Time `json:"created"`
	// Ready is set after the image was made, and cleared before it is removed.
	Ready bool `json:"ready"`
	// Ephemeral volumes exist only while they are published.
	Ephemeral bool `json:"ephemeral,omitempty"`
	// Source is what the image was made from. A volume without a source was blank at first.
	Source source `json:"source,omitzero"`
	// AsFrozen: the filesystem is that of a consistent source, and nobody has mounted it since where that writes.
	AsFrozen bool `json:"asFrozen,omitempty"`
	// Snapshot is set if this is a snapshot.
	Snapshot *snapshot `json:"snapshot,omitempty"`
	// Volumes are the source volumes of a group of snapshots, sorted. Other records have none.
	Volumes []string `json:"volumes,omitempty"`
	// Buffered: its loop devices use the node's page cache.
	Buffered bool `json:"buffered,omitempty"`
	// Sector is the sector size of its loop devices, which its content may depend on: 0 is the pool's.
	Sector uint32 `json:"sector,omitempty"`
	// Holds is the filesystem that was found or made on the volume when it was deferred.
	Holds string `json:"holds,omitempty"`
	Node  *node  `json:"node,omitempty"`
}

const recordVersion = 1

// snapshot has the fields of a snapshot. Its image is never attached; its Source is the volume.
type snapshot struct {
	// Consistent: the filesystem was frozen or not in use. Otherwise the snapshot is as after
	// a loss of power, and the filesystem is repaired when it is mounted.
	Consistent bool `json:"consistent"`
	// Group is the id of the group snapshot that it belongs to, or "".
	Group string `json:"group,omitempty"`
	// Number is larger than those of all earlier snapshots of the volume: it orders them independent of the clock.
	Number int64 `json:"number"`
}

func (s *snapshot) String() string {
	if s.Consistent {
		return "filesystem"
	}
	return "crash"
}

// consistent reports whether the filesystem was frozen or not in use when the image was made: it does not need its log.
func (r *record) consistent() bool {
	return r.AsFrozen || r.Snapshot != nil && r.Snapshot.Consistent
}

// source names the volume or the snapshot whose content an image began with.
type source struct {
	Volume   string `json:"volume,omitempty"`
	Snapshot string `json:"snapshot,omitempty"`
}

func (s source) id() string { return s.Volume + s.Snapshot }

func (s source) String() string {
	switch {
	case s.Snapshot != "":
		return fmt.Sprintf("snapshot %q", s.Snapshot)
	case s.Volume != "":
		return fmt.Sprintf("volume %q", s.Volume)
	}
	return "nothing"
}

// node says how a volume is staged and published on this node. It is valid for one boot, as mounts are.
type node struct {
	Boot      string                 `json:"boot"`
	Staging   string                 `json:"staging,omitempty"`
	Block     bool                   `json:"block,omitempty"`
	FSType    string                 `json:"fsType,omitempty"`
	ReadOnly  bool                   `json:"readOnly,omitempty"` // by the access mode
	Published map[string]publication `json:"published,omitempty"`
}

// isOnlyRead reports whether only sandboxes have the volume, and all of them only read.
func (r *record) isOnlyRead() bool {
	if r.Node == nil {
		return false
	}
	all := slices.Collect(maps.Values(r.Node.Published))
	return len(all) > 0 && !slices.ContainsFunc(all, func(p publication) bool { return !p.Deferred || !p.ReadOnly })
}

// publication is how a volume is published at a target path.
type publication struct {
	Block    bool `json:"block,omitempty"`
	ReadOnly bool `json:"readOnly,omitempty"`
	Deferred bool `json:"deferred,omitempty"`
	// Sole: the volume may not be published at another target.
	Sole bool `json:"sole,omitempty"`
}

// locks has one lock for each volume. A call waits for a lock only as long as its caller waits for the call.
type locks struct{ sys.KeyLocks[string] }

// take acquires the locks of volumes; "" is none. The order is always the same, so that nobody waits in a circle.
func (l *locks) take(ctx context.Context, ids ...string) (release func(), err error) {
	var held []func()
	release = func() {
		for _, unlock := range held {
			unlock()
		}
	}
	names := make(map[string]struct{})
	for _, id := range ids {
		names[nameOf(id)] = struct{}{}
	}
	delete(names, "")
	for _, id := range slices.Sorted(maps.Keys(names)) {
		unlock, err := l.Lock(ctx, id)
		if err != nil {
			release()
			return nil, status.Errorf(codes.Aborted, "volume %q: another operation is still under way", id)
		}
		held = append(held, unlock)
	}
	return release, nil
}

// record locks a volume, a snapshot or a group, and finds its record. Without an error the caller has to call release.
func (l *locks) record(ctx context.Context, id string, find func(string) (*record, error)) (r *record, release func(), err error) {
	if release, err = l.take(ctx, id); err != nil {
		return nil, nil, err
	}
	if r, err = find(id); err != nil {
		release()
	}
	return r, release, err
}

// lockWait is how long an earlier driver of the data directory may take to end.
const lockWait = 2 * time.Second

// lockDataDir locks the data directory until release is called or the process dies. A second driver would mistake
// unfinished volumes of this one for those of a driver that was killed, and remove them.
func lockDataDir(dir string) (release func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the data directory: %w", err)
	}
	file, err := os.OpenFile(filepath.Join(dir, "driver.lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600) //nolint:gosec // in a directory of ours
	if err != nil {
		return nil, fmt.Errorf("open the lock of the data directory: %w", err)
	}
	err = sys.Lock(context.Background(), int(file.Fd()), lockWait)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("another crust-driver has the data directory %s: stop it, or give this one a --data-dir of its own", dir)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return func() { _ = file.Close() }, nil // nothing was written
}
