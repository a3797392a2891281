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
	"unique"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// recordVersion is the version of the records that are written. A record of a newer
// version is not touched: an older daemon cannot know what it means.
const recordVersion = 1

const maxRecord = 256 << 10

// record is one volume on disk: the volume and what is needed to undo it.
type record struct {
	Version int `json:"version"`
	// Boot is the kernel's boot id. Mounts and claims end with a boot, and with them the meaning of a record.
	Boot string `json:"boot"`
	volume.Volume
	// DeviceWasReadOnly is the device's own read-only flag before a read-only volume set
	// it, so that it can be restored.
	DeviceWasReadOnly bool `json:"deviceWasReadOnly,omitempty"`
	// Sequence tells the device from a later one with its number: see claim.Request. Older records have none.
	Sequence string `json:"sequence,omitempty"`
	// HostMounts is the ability of the handler when the device was claimed: a restart
	// claims it in the same way, whatever is configured then.
	HostMounts bool `json:"hostMounts,omitempty"`
	// MadeTarget is set if we made the target directory.
	MadeTarget bool `json:"madeTarget,omitempty"`

	guard guard.Seen // as it was when it was examined last; by the volume's lock
}

// claim is the record as the table of claims needs it.
func (r *record) claim() claim.Request {
	return claim.Request{Volume: &r.Volume, Mountable: r.HostMounts, WasReadOnly: r.DeviceWasReadOnly, Sequence: r.Sequence}
}

// The directories of the store.
const (
	volumesDir  = "volumes"
	removingDir = "removing"
	heldDir     = "held"
	tmpDir      = "tmp"
)

// store has one file for each volume:
//
//	volumes/<key>.json   volumes that shall exist
//	removing/<key>.json  volumes that are being removed: a restart ends the removal
//	held/                devices that were released by force and that somebody may have
//	bad/                 files of other names, set aside
//	tmp/                 incomplete files
//
// A file is written under tmp and renamed into place, so that a reader, or a start after a
// kill, sees the old one or the new one. Nothing is synced: the directory is on tmpfs, and
// after a power cut the records mean nothing (see record.Boot).
type store struct {
	dir    string
	serial atomic.Uint64
}

func openStore(dir string) (*store, error) {
	s := &store{dir: dir}
	for _, part := range []string{tmpDir, volumesDir, removingDir, heldDir} {
		if err := os.MkdirAll(filepath.Join(dir, part), 0o700); err != nil {
			return nil, volume.Errorf(volume.DiskKind(err), "the state directory cannot be made: %w", err)
		}
	}
	s.clearTmp()
	s.serial.Store(uint64(time.Now().UnixNano()))
	return s, nil
}

// clearTmp removes incomplete files that a kill left. What cannot be removed does no
// harm: every start writes under names of its own.
func (s *store) clearTmp() {
	tmp := filepath.Join(s.dir, tmpDir)
	names, _ := os.ReadDir(tmp)
	for _, name := range names {
		// Handlers have sub-directories of their own below tmp.
		if !name.IsDir() {
			_ = os.Remove(filepath.Join(tmp, name.Name()))
		}
	}
}

func (s *store) path(dir string, key volume.Key) string {
	return filepath.Join(s.dir, dir, string(key)+".json")
}

// put writes the record of a volume that shall exist.
func (s *store) put(r *record) error {
	raw, err := sys.EncodeJSON(r, maxRecord)
	if err != nil {
		return volume.Errorf(volume.Invalid, "volume %s: the record cannot be encoded: %w", sys.Clip(r.Target), err)
	}
	return s.write(&r.Volume, s.path(volumesDir, r.Key), raw)
}

func (s *store) write(v *volume.Volume, path string, raw []byte) error {
	tmp := filepath.Join(s.dir, tmpDir, fmt.Sprintf("%s.%d", v.Key, s.serial.Add(1)))
	err := sys.InDir(filepath.Dir(tmp), func() error { return sys.WriteNew(unix.AT_FDCWD, tmp, raw) })
	if err == nil {
		err = unix.Rename(tmp, path)
	}
	if err != nil {
		_ = unix.Unlink(tmp)
		return volume.Errorf(volume.DiskKind(err), "volume %s: the record cannot be written below %s: %w", v.Target, s.dir, err)
	}
	return nil
}

// beginRemoval marks the volume as being removed. From now on a restart ends the removal
// instead of restoring the volume.
func (s *store) beginRemoval(key volume.Key) error {
	begun := s.path(removingDir, key)
	err := sys.InDir(filepath.Dir(begun), func() error { return unix.Rename(s.path(volumesDir, key), begun) })
	if err != nil && !errors.Is(err, unix.ENOENT) { // else it was begun before
		return volume.Errorf(volume.DiskKind(err), "volume %s: the removal cannot be recorded below %s: %w", key.Short(), s.dir, err)
	}
	return nil
}

func (s *store) endRemoval(key volume.Key) error {
	if err := unix.Unlink(s.path(removingDir, key)); err != nil && !errors.Is(err, unix.ENOENT) {
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

// unusable is a file among the records that cannot be read as one.
type unusable struct {
	dir, name string
	// key is the volume's, from the name of the file, or "". The name alone proves that the volume exists.
	key volume.Key
	// hint is the record of a newer daemon as far as this one understands it, or nil.
	hint *record
	err  error
}

// load reads all records, and sets files of other names aside. A record that cannot be
// read does not keep the others from being served.
func (s *store) load() (out loaded, err error) {
	for dir, into := range map[string]*[]*record{volumesDir: &out.volumes, removingDir: &out.removing} {
		records, unread, err := s.readAll(dir)
		if err != nil {
			return out, err
		}
		*into = records
		for _, file := range unread {
			if file.key != "" {
				out.unusable = append(out.unusable, file)
			} else {
				out.problems = append(out.problems, s.setAside(dir, file.name, file.err))
			}
		}
	}
	return out, nil
}

func (s *store) readAll(dir string) (records []*record, unread []unusable, err error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, dir))
	if err != nil {
		return nil, nil, volume.Errorf(volume.Internal, "the records cannot be read: %w", err)
	}
	var mu sync.Mutex
	parts := slices.Collect(slices.Chunk(entries, 64))
	sys.Each(2*runtime.GOMAXPROCS(0), slices.All(parts), func(_ int, part []os.DirEntry) {
		for _, entry := range part {
			rec, err := readRecord(filepath.Join(s.dir, dir, entry.Name()))
			mu.Lock()
			if err == nil {
				records = append(records, rec)
			} else {
				unread = append(unread, unusable{dir: dir, name: entry.Name(), key: keyOfFile(entry.Name()), hint: rec, err: err})
			}
			mu.Unlock()
		}
	})
	return records, unread, nil
}

// keyOfFile returns the key in the name of a record's file, or "".
func keyOfFile(name string) volume.Key {
	key, ok := strings.CutSuffix(name, ".json")
	if sum, err := hex.DecodeString(key); !ok || err != nil || len(sum) != sha256.Size || strings.ToLower(key) != key {
		return ""
	}
	return volume.Key(key)
}

// setAside moves a file whose name is not that of a record into bad/, unless a newer daemon wrote it.
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

var errNewerRecord = errors.New("it was written by a newer crust-proxy")

// readRecord reads one record. Of a newer version it returns the fields it knows, and errNewerRecord.
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
	rec.share()
	return rec, err
}

// share lets equal texts share memory: a node has thousands of records after a restart.
func (r *record) share() {
	texts := []*string{&r.Boot, &r.FSType, &r.Group, &r.Handler, &r.Driver}
	for i := range r.MountFlags {
		texts = append(texts, &r.MountFlags[i])
	}
	for _, text := range texts {
		*text = unique.Make(*text).Value()
	}
	if r.ResolvedTarget == r.Target {
		r.ResolvedTarget = r.Target
	}
	if r.Backing == r.Device.Path {
		r.Backing = r.Device.Path
	}
}

func parseRecord(raw []byte) (*record, error) {
	var rec record
	unread := json.Unmarshal(raw, &rec) // a field of another type does not keep the others from being read
	err := rec.check()
	switch {
	case rec.Version > recordVersion && err == nil && unread == nil:
		return &rec, errNewerRecord
	case rec.Version > recordVersion:
		return nil, errNewerRecord
	case unread != nil:
		return nil, fmt.Errorf("not a record: %w", unread)
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

// OnRecord lists the volumes of this boot that a state directory has on record, those that are being removed among
// them, and if wanted those whose devices are held after a release by force. It changes nothing, and the daemon may run.
// After an error the lists are incomplete: the caller must treat each record that cannot be read as a volume in use.
func OnRecord(stateDir string, wantHeld bool) (out, held []*volume.Volume, err error) {
	boot, err := sys.BootID()
	if err != nil {
		return nil, nil, err
	}
	var problems []error
	for _, part := range []string{volumesDir, removingDir} {
		records, unread, err := (&store{dir: stateDir}).readAll(part)
		problems = append(problems, err)
		for _, rec := range records {
			if rec.Boot == boot {
				out = append(out, &rec.Volume)
			}
		}
		for _, file := range unread {
			problems = append(problems, fmt.Errorf("the record %s cannot be read: %w", filepath.Join(stateDir, part, file.name), file.err))
		}
	}
	if wantHeld { // last, as they are written first
		forced, unread := (&store{dir: stateDir}).loadHeld(boot, func(string) error { return nil })
		held = sys.Map(forced, func(one claim.Held) *volume.Volume { return one.Volume })
		problems = append(problems, unread...)
	}
	slices.SortFunc(out, func(x, y *volume.Volume) int { return strings.Compare(x.Target, y.Target) })
	gone := func(err error) bool { return errors.Is(err, fs.ErrNotExist) } // never made, or removed meanwhile
	return out, held, errors.Join(slices.DeleteFunc(problems, gone)...)
}

// HasRecord reports whether a state directory has a record of a volume, even one that cannot be read.
func HasRecord(stateDir string, key volume.Key) bool {
	s := &store{dir: stateDir}
	return unix.Access(s.path(volumesDir, key), unix.F_OK) == nil || unix.Access(s.path(removingDir, key), unix.F_OK) == nil
}

// heldRecord is a device that was released by force, until the kernel counts nobody who has it.
type heldRecord struct {
	Version  int            `json:"version"`
	Boot     string         `json:"boot"`
	Volume   *volume.Volume `json:"volume"`
	Sequence string         `json:"sequence,omitempty"` // see claim.Held
	Since    time.Time      `json:"since"`
}

func (s *store) heldPath(v *volume.Volume) string {
	return filepath.Join(s.dir, heldDir, fmt.Sprintf("%s.%d.%d.%d.json", v.Key, v.Device.Major, v.Device.Minor, v.Device.Inode))
}

// putHeld is called before the device is released.
func (s *store) putHeld(h claim.Held, boot string) error {
	raw, err := sys.EncodeJSON(&heldRecord{Version: recordVersion, Boot: boot, Volume: h.Volume, Sequence: h.Sequence, Since: h.Since}, maxRecord)
	if err != nil {
		return volume.Errorf(volume.Internal, "volume %s: the record cannot be encoded: %w", h.Volume.Target, err)
	}
	return s.write(h.Volume, s.heldPath(h.Volume), raw)
}

// dropHeld removes a record. One that cannot be removed is dropped at the next start.
func (s *store) dropHeld(v *volume.Volume) { _ = unix.Unlink(s.heldPath(v)) }

// loadHeld reads the records, and drops those of an earlier boot.
func (s *store) loadHeld(boot string, drop func(path string) error) (all []claim.Held, problems []error) {
	names, err := os.ReadDir(filepath.Join(s.dir, heldDir))
	if err != nil {
		return nil, []error{volume.Errorf(volume.Internal, "the records of devices that were released by force cannot be read: %w", err)}
	}
	for _, name := range names {
		var rec heldRecord
		path := filepath.Join(s.dir, heldDir, name.Name())
		raw, err := sys.ReadSmall(path, maxRecord)
		if err == nil {
			err = json.Unmarshal(raw, &rec)
		}
		switch {
		case err == nil && rec.Boot != "" && rec.Boot != boot:
			_ = drop(path)
		case err == nil && rec.Version <= recordVersion && rec.Volume != nil && rec.Volume.Device.Kind != "":
			all = append(all, claim.Held{Volume: rec.Volume, Sequence: rec.Sequence, Since: rec.Since})
		default:
			problems = append(problems, volume.Errorf(volume.Internal, "the record %s of a device that was released by force cannot be used: %w",
				path, errors.Join(err, errors.New("crustctl cannot show whether a process still has that device open, and the host is not kept from mounting it"))))
		}
	}
	return all, problems
}
