package deferral

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// recordVersion is the form of the records written. A record of a newer form is
// not touched: an older daemon cannot know what it means.
const recordVersion = 1

const maxRecord = 256 << 10

// record is one volume on disk: the volume and what is needed to undo it.
type record struct {
	Version int `json:"version"`
	// Boot is the kernel's boot id. Mounts and claims die with a boot; so does
	// the meaning of a record, wherever the state directory lies.
	Boot string `json:"boot"`
	Volume
	// DeviceWasReadOnly is the device's own state before a read-only volume set
	// it, so that it can be put back.
	DeviceWasReadOnly bool `json:"deviceWasReadOnly,omitempty"`
	// HostMounts is the ability of the handler, as it was when the device was
	// claimed: the claim is taken up in the same way, whatever is configured then.
	HostMounts bool `json:"hostMounts,omitempty"`
	// MadeTarget is set where we made the target directory.
	MadeTarget bool `json:"madeTarget,omitempty"`
}

// store keeps one file a volume:
//
//	volumes/<key>.json   volumes that shall exist
//	removing/<key>.json  volumes on their way out: a removal that was begun is ended
//	bad/                 files that cannot be read, set aside
//	tmp/                 files not yet whole
//
// A file is written under tmp and renamed into place, so that a reader and a
// kill see the old one or the new one. Nothing is synced: the directory is on
// tmpfs, and after a power cut the records mean nothing (see record.Boot).
type store struct {
	dir      string
	tmp      int
	volumes  int
	removing int
	serial   atomic.Uint64
}

func openStore(dir string) (*store, error) {
	s := &store{dir: dir, tmp: noFD, volumes: noFD, removing: noFD}
	for _, part := range []struct {
		name string
		fd   *int
	}{{"tmp", &s.tmp}, {"volumes", &s.volumes}, {"removing", &s.removing}} {
		path := filepath.Join(dir, part.name)
		if err := os.MkdirAll(path, 0o700); err != nil {
			s.close()
			return nil, Errorf(storeKind(err), "the state directory cannot be made: %w", err)
		}
		fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			s.close()
			return nil, Errorf(Internal, "the state directory %s cannot be opened: %w", path, err)
		}
		*part.fd = fd
	}
	if err := s.clearTmp(); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *store) close() {
	closeFD(s.tmp)
	closeFD(s.volumes)
	closeFD(s.removing)
}

// clearTmp removes what a kill left half-written.
func (s *store) clearTmp() error {
	names, err := os.ReadDir(filepath.Join(s.dir, "tmp"))
	if err != nil {
		return Errorf(Internal, "the state directory cannot be read: %w", err)
	}
	for _, name := range names {
		// Handlers have sub-directories of their own below tmp.
		if name.IsDir() {
			continue
		}
		if err := unix.Unlinkat(s.tmp, name.Name(), 0); err != nil {
			return Errorf(Internal, "the leftover %s cannot be removed: %w", name.Name(), err)
		}
	}
	return nil
}

func fileName(key Key) string { return string(key) + ".json" }

// put writes the record of a volume that shall exist.
func (s *store) put(r *record) error {
	raw, err := json.Marshal(r)
	if err != nil {
		return Errorf(Internal, "volume %s: the record cannot be encoded: %w", r.Target, err)
	}
	tmp := fmt.Sprintf("%s.%d", r.Key, s.serial.Add(1))
	if err := s.writeTmp(tmp, raw); err != nil {
		return s.putError(r, err)
	}
	if err := unix.Renameat(s.tmp, tmp, s.volumes, fileName(r.Key)); err != nil {
		_ = unix.Unlinkat(s.tmp, tmp, 0)
		return s.putError(r, err)
	}
	return nil
}

func (s *store) putError(r *record, err error) error {
	return Errorf(storeKind(err), "volume %s: the record cannot be written below %s: %w", r.Target, s.dir, err)
}

func storeKind(err error) Kind {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return Exhausted
	}
	return Internal
}

func (s *store) writeTmp(name string, raw []byte) error {
	fd, err := unix.Openat(s.tmp, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	err = writeAll(fd, raw)
	// The error of close is the last word on a full disk.
	if closeErr := unix.Close(fd); err == nil {
		err = closeErr
	}
	if err != nil {
		_ = unix.Unlinkat(s.tmp, name, 0)
	}
	return err
}

func writeAll(fd int, raw []byte) error {
	for len(raw) > 0 {
		n, err := unix.Write(fd, raw)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		raw = raw[n:]
	}
	return nil
}

// beginRemoval notes that the volume shall go. From here on a restart ends the
// removal instead of putting the volume back.
func (s *store) beginRemoval(key Key) error {
	err := unix.Renameat(s.volumes, fileName(key), s.removing, fileName(key))
	if errors.Is(err, unix.ENOENT) {
		return nil // begun before
	}
	if err != nil {
		return Errorf(storeKind(err), "volume %s: the removal cannot be noted below %s: %w", key.Short(), s.dir, err)
	}
	return nil
}

// endRemoval forgets the volume.
func (s *store) endRemoval(key Key) error {
	if err := unix.Unlinkat(s.removing, fileName(key), 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return Errorf(Internal, "volume %s: the record cannot be removed below %s: %w", key.Short(), s.dir, err)
	}
	return nil
}

// drop forgets a volume wherever its record stands.
func (s *store) drop(key Key) error {
	if err := s.beginRemoval(key); err != nil {
		return err
	}
	return s.endRemoval(key)
}

// loaded is what a state directory holds.
type loaded struct {
	volumes  []*record
	removing []*record
	problems []error
	newer    []Key // volumes whose records a newer daemon wrote
}

// load reads all records. One that cannot be read is set aside and told of; it
// does not keep the others from being served.
func (s *store) load() (loaded, error) {
	var out loaded
	for _, part := range []struct {
		name string
		into *[]*record
	}{{"volumes", &out.volumes}, {"removing", &out.removing}} {
		dir := filepath.Join(s.dir, part.name)
		entries, err := os.ReadDir(dir)
		if err != nil {
			return out, Errorf(Internal, "the state directory cannot be read: %w", err)
		}
		records, problems := s.readAll(dir, entries)
		*part.into = records
		out.problems = append(out.problems, problems...)
		out.newer = append(out.newer, newerRecords(problems)...)
	}
	return out, nil
}

func newerRecords(problems []error) (keys []Key) {
	for _, problem := range problems {
		var newer *newerRecord
		if errors.As(problem, &newer) {
			keys = append(keys, newer.key)
		}
	}
	return keys
}

// readAll reads the records of a directory, several at a time.
func (s *store) readAll(dir string, entries []os.DirEntry) (records []*record, problems []error) {
	var mu sync.Mutex
	var readers errgroup.Group
	readers.SetLimit(2 * runtime.GOMAXPROCS(0))
	for part := range slices.Chunk(entries, 64) {
		readers.Go(func() error {
			for _, entry := range part {
				rec, err := readRecord(filepath.Join(dir, entry.Name()))
				if err != nil {
					err = s.setAside(dir, entry.Name(), err)
				}
				mu.Lock()
				if err != nil {
					problems = append(problems, err)
				} else {
					records = append(records, rec)
				}
				mu.Unlock()
			}
			return nil
		})
	}
	_ = readers.Wait() // every error is among the problems
	return records, problems
}

func (s *store) setAside(dir, name string, cause error) error {
	bad := filepath.Join(s.dir, "bad")
	if errors.Is(cause, errNewerRecord) {
		return Errorf(Internal, "the record %s/%s is left alone: %w", dir, name, &newerRecord{key: Key(strings.TrimSuffix(name, ".json"))})
	}
	err := os.MkdirAll(bad, 0o700)
	if err == nil {
		err = os.Rename(filepath.Join(dir, name), filepath.Join(bad, name))
	}
	if err != nil {
		return Errorf(Internal, "the record %s/%s cannot be read (%w) nor set aside: %w", dir, name, cause, err)
	}
	return Errorf(Internal, "the record %s cannot be read and was set aside in %s: %w", name, bad, cause)
}

var errNewerRecord = errors.New("it was written by a newer crust-proxy")

// newerRecord is errNewerRecord of a volume.
type newerRecord struct{ key Key }

// Error is the same text.
func (e *newerRecord) Error() string { return errNewerRecord.Error() }

// Unwrap gives errNewerRecord.
func (e *newerRecord) Unwrap() error { return errNewerRecord }

func readRecord(path string) (*record, error) {
	raw, err := readSmall(path)
	if err != nil {
		return nil, err
	}
	rec, err := parseRecord(raw)
	if err != nil {
		return nil, err
	}
	if name := strings.TrimSuffix(filepath.Base(path), ".json"); name != string(rec.Key) {
		return nil, fmt.Errorf("it holds volume %s", rec.Key.Short())
	}
	return rec, nil
}

// readSmall reads a record's file with no more system calls than it takes: a
// start reads thousands.
func readSmall(path string) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer closeFD(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > maxRecord {
		return nil, fmt.Errorf("not a regular file of at most %d bytes", maxRecord)
	}
	raw := make([]byte, st.Size)
	n, err := unix.Pread(fd, raw, 0)
	return raw[:max(n, 0)], err
}

// parseRecord reads and checks a record.
func parseRecord(raw []byte) (*record, error) {
	var rec record
	if err := json.Unmarshal(raw, &rec); err != nil {
		return nil, fmt.Errorf("not a record: %w", err)
	}
	switch {
	case rec.Version > recordVersion:
		return nil, errNewerRecord
	case rec.Version != recordVersion:
		return nil, fmt.Errorf("unknown version %d", rec.Version)
	case rec.ResolvedTarget == "" || rec.Key != KeyOf(rec.ResolvedTarget):
		return nil, errors.New("key and target do not belong together")
	case rec.Handler == "":
		return nil, errors.New("no handler")
	case rec.Device.Kind != BlockDevice && rec.Device.Kind != ImageFile:
		return nil, errors.New("no device")
	}
	return &rec, nil
}

// bootID tells this boot from every other.
func bootID() (string, error) {
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", Errorf(Internal, "the boot id cannot be read: %w", err)
	}
	return strings.TrimSpace(string(raw)), nil
}
