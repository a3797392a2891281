package driver

import (
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

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
)

// store keeps one file a volume, named by a hash of the volume's id.
type store struct{ dir string }

const (
	recordSuffix = ".json"
	tempPrefix   = ".new-"
)

// fileName is a volume id as a part of a path.
func fileName(id string) string {
	sum := sha256.Sum256([]byte(id))
	return hex.EncodeToString(sum[:])
}

func (s store) path(id string) string { return filepath.Join(s.dir, fileName(id)+recordSuffix) }

// load gives nil where there is no such volume.
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

// list gives all volumes by id, and the errors of records that cannot be read.
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

// save replaces the record, so that after a crash there is the old or the new one.
func (s store) save(r *record) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("write the record of volume %q: %w", r.ID, err)
		}
	}()
	raw, err := json.Marshal(r)
	if err != nil {
		return err
	}
	temp, err := os.CreateTemp(s.dir, tempPrefix)
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(temp.Name()) }() // gone already when it was moved
	_, err = temp.Write(raw)
	err = errors.Join(err, temp.Sync(), temp.Close())
	failpoint.Hit("driver-record-temp")
	if err == nil {
		err = os.Rename(temp.Name(), s.path(r.ID))
	}
	return errors.Join(err, syncDir(s.dir))
}

// unready puts on record that what it describes is about to go. A full disk has no room for
// that, and only what goes makes some: killed then, the same removal has to come again.
func (s store) unready(r *record) error {
	if !r.Ready {
		return nil // nor is it on the disk
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

// clean removes what killed writers left.
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
