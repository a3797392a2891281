package front

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
	"go.uber.org/zap"
)

// Staged is a CSI volume whose driver has staged a device at a private path: only
// the front knows how to have that undone.
type Staged struct{ Driver, VolumeID, Path string }

// StagedPrivately reads them from a state directory and changes nothing: the
// daemon may be running or not. An error says that the list is not whole.
func StagedPrivately(stateDir string) ([]Staged, error) {
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(stateDir, recordDir)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("the front's records cannot be read: %w", err)
	}
	var out []Staged
	var problems []error
	for _, entry := range entries {
		path := filepath.Join(dir, entry.Name())
		if !strings.HasSuffix(path, ".json") {
			continue // half-written
		}
		rec, err := readRecord(path)
		switch {
		case errors.Is(err, fs.ErrNotExist): // it went meanwhile
		case err != nil:
			problems = append(problems, fmt.Errorf("the front's record %s cannot be read: %w", path, err))
		case rec.Boot == boot && rec.Stage != nil && rec.Stage.At == stagedPrivately:
			out = append(out, Staged{Driver: rec.Driver, VolumeID: rec.ID, Path: rec.Stage.Path})
		}
	}
	return out, errors.Join(problems...)
}

// readRecord reads and checks one file.
func readRecord(path string) (volumeRecord, error) {
	var rec volumeRecord
	raw, err := os.ReadFile(path) //nolint:gosec // a name of our own directory
	if err != nil {
		return rec, err
	}
	if err := json.Unmarshal(raw, &rec); err != nil {
		return rec, err
	}
	if rec.Version != recordVersion {
		return rec, fmt.Errorf("it is of version %d", rec.Version)
	}
	return rec, nil
}

// dropGone takes targets from the records that went while nobody stood before
// their driver, for they would keep their volume from being deferred. kubelet makes
// the directory around a target before a publish, and removes it last. A mount is
// not touched: its server may have gone.
func (r *records) dropGone(log *zap.Logger) {
	if len(r.all) == 0 {
		return
	}
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		log.Warn("mounts cannot be listed, so the front's records stay as they are", zap.Error(err))
		return
	}
	mounted := make(map[string]bool, len(mounts))
	for _, one := range mounts {
		mounted[one.Mountpoint] = true
	}
	for _, rec := range r.all {
		kept := make([]string, 0, len(rec.Plain))
		for _, target := range rec.Plain {
			if mounted[target] || exists(filepath.Dir(target)) {
				kept = append(kept, target)
			}
		}
		if len(kept) == len(rec.Plain) {
			continue
		}
		rec.Plain = kept
		if err := r.put(rec); err != nil {
			log.Warn("a record of the front is not up to date", zap.Error(err))
		}
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
