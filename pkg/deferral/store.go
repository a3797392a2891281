package deferral

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// recordVersion is the version of the records that are written. A record of a newer
// version is not touched: an older daemon cannot know what it means.
const recordVersion = 1

const maxRecord = 256 << 10

// record is one volume on disk: the volume and what is needed to undo it.
type record struct {
	Version int `json:"version"`
	// Boot is the kernel's boot id. Mounts and claims end with a boot, and with them the
	// meaning of a record.
	Boot string `json:"boot"`
	volume.Volume
	// DeviceWasReadOnly is the device's own read-only flag before a read-only volume set
	// it, so that it can be restored.
	DeviceWasReadOnly bool `json:"deviceWasReadOnly,omitempty"`
	// HostMounts is the ability of the handler when the device was claimed: a restart
	// claims it in the same way, whatever is configured then.
	HostMounts bool `json:"hostMounts,omitempty"`
	// MadeTarget is set if we made the target directory.
	MadeTarget bool `json:"madeTarget,omitempty"`
}

// claim is the record as the table of claims needs it.
func (r *record) claim() claim.Request {
	return claim.Request{Volume: &r.Volume, Mountable: r.HostMounts, WasReadOnly: r.DeviceWasReadOnly}
}

// The directories of the store's records.
const (
	volumesDir  = "volumes"
	removingDir = "removing"
)

// store has one file for each volume:
//
//	volumes/<key>.json   volumes that shall exist
//	removing/<key>.json  volumes that are being removed: a restart ends the removal
//	bad/                 files of other names, set aside
//	tmp/                 incomplete files
//
// A file is written under tmp and renamed into place, so that a reader, or a start after a
// kill, sees the old one or the new one. Nothing is synced: the directory is on tmpfs, and
// after a power cut the records mean nothing (see record.Boot).
type store struct {
	dir      string
	tmp      int
	volumes  int
	removing int
	serial   atomic.Uint64
}

func openStore(dir string) (*store, error) {
	s := &store{dir: dir, tmp: sys.NoFD, volumes: sys.NoFD, removing: sys.NoFD}
	for _, part := range []struct {
		name string
		fd   *int
	}{{"tmp", &s.tmp}, {volumesDir, &s.volumes}, {removingDir, &s.removing}} {
		path := filepath.Join(dir, part.name)
		if err := os.MkdirAll(path, 0o700); err != nil {
			s.close()
			return nil, volume.Errorf(volume.DiskKind(err), "the state directory cannot be made: %w", err)
		}
		fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			s.close()
			return nil, volume.Errorf(volume.Internal, "the state directory %s cannot be opened: %w", path, err)
		}
		*part.fd = fd
	}
	s.clearTmp()
	s.serial.Store(uint64(time.Now().UnixNano()))
	return s, nil
}

func (s *store) close() {
	sys.CloseFD(s.tmp)
	sys.CloseFD(s.volumes)
	sys.CloseFD(s.removing)
}

// clearTmp removes incomplete files that a kill left. What cannot be removed does no
// harm: every start writes under names of its own.
func (s *store) clearTmp() {
	names, err := os.ReadDir(filepath.Join(s.dir, "tmp"))
	if err != nil {
		return
	}
	for _, name := range names {
		// Handlers have sub-directories of their own below tmp.
		if !name.IsDir() {
			_ = unix.Unlinkat(s.tmp, name.Name(), 0)
		}
	}
}

func fileName(key volume.Key) string { return string(key) + ".json" }

// put writes the record of a volume that shall exist.
func (s *store) put(r *record) error {
	raw, err := json.Marshal(r)
	if err != nil {
		return volume.Errorf(volume.Internal, "volume %s: the record cannot be encoded: %w", r.Target, err)
	}
	tmp := fmt.Sprintf("%s.%d", r.Key, s.serial.Add(1))
	if err := sys.WriteNew(s.tmp, tmp, raw); err != nil {
		return s.putError(r, err)
	}
	if err := unix.Renameat(s.tmp, tmp, s.volumes, fileName(r.Key)); err != nil {
		_ = unix.Unlinkat(s.tmp, tmp, 0)
		return s.putError(r, err)
	}
	return nil
}

func (s *store) putError(r *record, err error) error {
	return volume.Errorf(volume.DiskKind(err), "volume %s: the record cannot be written below %s: %w", r.Target, s.dir, err)
}

// beginRemoval marks the volume as being removed. From now on a restart ends the removal
// instead of restoring the volume.
func (s *store) beginRemoval(key volume.Key) error {
	err := unix.Renameat(s.volumes, fileName(key), s.removing, fileName(key))
	if errors.Is(err, unix.ENOENT) {
		return nil // begun before
	}
	if err != nil {
		return volume.Errorf(volume.DiskKind(err), "volume %s: the removal cannot be noted below %s: %w", key.Short(), s.dir, err)
	}
	return nil
}

func (s *store) endRemoval(key volume.Key) error {
	if err := unix.Unlinkat(s.removing, fileName(key), 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return volume.Errorf(volume.Internal, "volume %s: the record cannot be removed below %s: %w", key.Short(), s.dir, err)
	}
	return nil
}

type loaded struct {
	volumes  []*record
	removing []*record
	unusable []unusable
	problems []error // files that belong to no volume
}

// unusable is a file that has the name of a volume's record and cannot be read as
// one. The name alone says that the volume exists.
type unusable struct {
	key      volume.Key
	removing bool
	// hint is the record of a newer daemon as far as this one understands it, or nil.
	hint *record
	err  error
}

// load reads all records. One that cannot be read does not keep the others from
// being served.
func (s *store) load() (loaded, error) {
	var out loaded
	for _, part := range []struct {
		dir  string
		into *[]*record
	}{{volumesDir, &out.volumes}, {removingDir, &out.removing}} {
		entries, err := os.ReadDir(filepath.Join(s.dir, part.dir))
		if err != nil {
			return out, volume.Errorf(volume.Internal, "the state directory cannot be read: %w", err)
		}
		*part.into = s.readAll(part.dir, entries, &out)
	}
	return out, nil
}

func (s *store) readAll(dir string, entries []os.DirEntry, out *loaded) (records []*record) {
	var mu sync.Mutex
	var readers errgroup.Group
	readers.SetLimit(2 * runtime.GOMAXPROCS(0))
	for part := range slices.Chunk(entries, 64) {
		readers.Go(func() error {
			for _, entry := range part {
				rec, err := readRecord(filepath.Join(s.dir, dir, entry.Name()))
				mu.Lock()
				if err == nil {
					records = append(records, rec)
				} else if key, ok := keyOfFile(entry.Name()); ok {
					out.unusable = append(out.unusable, unusable{key: key, removing: dir == removingDir, hint: rec, err: err})
				} else {
					out.problems = append(out.problems, s.setAside(dir, entry.Name(), err))
				}
				mu.Unlock()
			}
			return nil
		})
	}
	_ = readers.Wait() // every error is in out
	return records
}

func keyOfFile(name string) (volume.Key, bool) {
	key, ok := strings.CutSuffix(name, ".json")
	sum, err := hex.DecodeString(key)
	return volume.Key(key), ok && err == nil && len(sum) == sha256.Size && strings.ToLower(key) == key
}

// setAside moves a file away that has not the name of a record, unless a newer daemon
// wrote it.
func (s *store) setAside(dir, name string, cause error) error {
	if errors.Is(cause, errNewerRecord) {
		return volume.Errorf(volume.Internal, "the file %s is left alone: %w", filepath.Join(s.dir, dir, name), cause)
	}
	bad := filepath.Join(s.dir, "bad")
	err := os.MkdirAll(bad, 0o700)
	if err == nil {
		err = os.Rename(filepath.Join(s.dir, dir, name), filepath.Join(bad, name))
	}
	if err != nil {
		return volume.Errorf(volume.Internal, "the file %s is no record (%w) and cannot be set aside: %w", filepath.Join(s.dir, dir, name), cause, err)
	}
	return volume.Errorf(volume.Internal, "the file %s is no record and was set aside in %s: %w", name, bad, cause)
}

func (s *store) read(key volume.Key) (*record, error) { return readRecord(s.path(volumesDir, key)) }

func (s *store) path(dir string, key volume.Key) string {
	return filepath.Join(s.dir, dir, fileName(key))
}

var errNewerRecord = errors.New("it was written by a newer crust-proxy")

// readRecord reads one record. Of a newer one it gives what it understands, with
// errNewerRecord.
func readRecord(path string) (*record, error) {
	raw, err := sys.ReadSmall(path, maxRecord)
	if err != nil {
		return nil, err
	}
	rec, err := parseRecord(raw)
	if rec == nil {
		return nil, err
	}
	if name := strings.TrimSuffix(filepath.Base(path), ".json"); name != string(rec.Key) {
		return nil, fmt.Errorf("it holds volume %s", rec.Key.Short())
	}
	return rec, err
}

func parseRecord(raw []byte) (*record, error) {
	var rec record
	if err := json.Unmarshal(raw, &rec); err != nil {
		return nil, fmt.Errorf("not a record: %w", err)
	}
	err := rec.check()
	switch {
	case rec.Version > recordVersion && err == nil:
		return &rec, errNewerRecord
	case rec.Version > recordVersion:
		return nil, errNewerRecord
	case rec.Version != recordVersion:
		return nil, fmt.Errorf("unknown version %d", rec.Version)
	case err != nil:
		return nil, err
	}
	return &rec, nil
}

func (r *record) check() error {
	switch {
	case r.ResolvedTarget == "" || r.Key != volume.KeyOf(r.ResolvedTarget):
		return errors.New("key and target do not belong together")
	case r.Handler == "":
		return errors.New("no handler")
	case r.Device.Kind != volume.BlockDevice && r.Device.Kind != volume.ImageFile:
		return errors.New("no device")
	}
	return nil
}

func bootID() (string, error) {
	id, err := sys.BootID()
	if err != nil {
		return "", volume.Errorf(volume.Internal, "the boot id cannot be read: %w", err)
	}
	return id, nil
}

// OnRecord reads which volumes a state directory has on record, of this boot,
// and changes nothing: the daemon may be running or not. Those on their way out
// are among them. An error says that the list is not whole, for a record cannot be
// read: whoever asks has to take it for a volume that lives.
func OnRecord(stateDir string) ([]*volume.Volume, error) {
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	var out []*volume.Volume
	var problems []error
	for _, part := range []string{volumesDir, removingDir} {
		dir := filepath.Join(stateDir, part)
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			problems = append(problems, volume.Errorf(volume.Internal, "the records cannot be read: %w", err))
		}
		for _, entry := range entries {
			rec, err := readRecord(filepath.Join(dir, entry.Name()))
			switch {
			case errors.Is(err, fs.ErrNotExist): // it went meanwhile
			case err != nil:
				problems = append(problems, fmt.Errorf("the record %s cannot be read: %w", filepath.Join(dir, entry.Name()), err))
			case rec.Boot == boot:
				out = append(out, &rec.Volume)
			}
		}
	}
	slices.SortFunc(out, func(x, y *volume.Volume) int { return strings.Compare(x.Target, y.Target) })
	return out, errors.Join(problems...)
}
