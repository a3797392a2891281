package driver

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// store keeps one file for each volume, named by a hash of the volume's id.
type store struct {
	dir   string
	spare *spare
}

const (
	recordSuffix = ".json"
	tempPrefix   = ".new-"
)

// fileName turns a volume id into the name of a file.
func fileName(id string) string {
	sum := sha256.Sum256([]byte(id))
	return hex.EncodeToString(sum[:])
}

func (s store) path(id string) string { return filepath.Join(s.dir, fileName(id)+recordSuffix) }

// load returns nil if there is no such volume.
func (s store) load(id string) (*record, error) {
	r, err := read(s.path(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil && r.ID != id {
		return nil, fmt.Errorf("the record of volume %q is one of %q", id, r.ID)
	}
	return r, err
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
		if !strings.HasSuffix(entry.Name(), recordSuffix) || strings.HasPrefix(entry.Name(), tempPrefix) {
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

// save replaces the record, so that after a crash there is the old or the new one. On a full
// disk a record that is there can still be replaced.
func (s store) save(r *record) error {
	raw, err := json.Marshal(r)
	if err == nil {
		err = s.write(s.path(r.ID), raw)
	}
	if volume.DiskKind(err) == volume.Exhausted && s.spare.replace(s.path(r.ID), raw) == nil {
		err = syncDir(s.dir)
	}
	if err != nil {
		return fmt.Errorf("write the record of volume %q: %w", r.ID, err)
	}
	return nil
}

func (s store) write(path string, raw []byte) error {
	temp, err := os.CreateTemp(s.dir, tempPrefix)
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(temp.Name()) }() // gone already when it was moved
	_, err = temp.Write(raw)
	err = errors.Join(err, temp.Sync(), temp.Close())
	failpoint.Hit("driver-record-temp")
	if err == nil {
		err = os.Rename(temp.Name(), path)
	}
	return errors.Join(err, syncDir(s.dir))
}

// spare is a file that has its room on the disk already. Without it no pod could leave a
// full disk, and so none of the volumes that fill it could be deleted.
type spare struct {
	mu   sync.Mutex
	path string
}

// spareSize is a block of most filesystems, and more than most records have.
const spareSize = 4096

// openSpare makes the file; on a disk that is full already, there may be none.
func openSpare(path string) (*spare, error) {
	info, err := os.Stat(path)
	if err == nil && info.Size() > 0 {
		return &spare{path: path}, nil
	}
	err = os.WriteFile(path, make([]byte, spareSize), 0o600)
	if volume.DiskKind(err) == volume.Exhausted {
		err = nil
	}
	return &spare{path: path}, err
}

// replace writes a record into the spare and exchanges the two files: the old record is the
// next spare. It fails where there is no old record.
func (s *spare) replace(path string, raw []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	file, err := os.OpenFile(s.path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	// What is longer is overwritten by spaces, with which JSON may end: a file that is cut
	// would lose its room.
	info, err := file.Stat()
	if err == nil {
		_, err = file.WriteAt(append(raw, bytes.Repeat([]byte{' '}, max(0, int(info.Size())-len(raw)))...), 0)
	}
	if err = errors.Join(err, file.Sync(), file.Close()); err != nil {
		return err
	}
	return unix.Renameat2(unix.AT_FDCWD, s.path, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE)
}

// unready records that a volume is about to be removed. A full disk may have no room for the
// record, and the removal makes some, so it goes on. If the driver is killed then, the removal
// has to be repeated.
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
	return syncDir(s.dir)
}

// clean removes the temporary files of a driver that was killed.
func (s store) clean() error {
	left, err := filepath.Glob(filepath.Join(s.dir, tempPrefix+"*"))
	for _, path := range left {
		err = errors.Join(err, os.Remove(path))
	}
	return err
}

func syncDir(path string) error {
	dir, err := os.Open(path) //nolint:gosec // a directory of ours
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
