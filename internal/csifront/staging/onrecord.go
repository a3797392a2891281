package staging

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// Staged is a CSI volume whose driver has staged a device at a private path: only
// the front knows how to have that undone.
type Staged struct{ Driver, VolumeID, Path string }

// StagedDevices reads them from a state directory and changes nothing: the
// daemon may be running or not. An error says that the list is not whole.
func StagedDevices(stateDir string) ([]Staged, error) {
	boot, err := sys.BootID()
	if err != nil {
		return nil, bootIDError(err)
	}
	dir := filepath.Join(stateDir, RecordDir)
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
		case rec.Boot == boot && rec.Stage != nil && rec.Stage.At == StagedAsDevice:
			out = append(out, Staged{Driver: rec.Driver, VolumeID: rec.ID, Path: rec.Stage.Path})
		}
	}
	return out, errors.Join(problems...)
}

// readRecord reads and checks one file.
func readRecord(path string) (Record, error) {
	var rec Record
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
func (r *Records) dropGone(log *zap.Logger) {
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
		gone := func(target string) bool { return !mounted[target] && !exists(filepath.Dir(target)) }
		if !slices.ContainsFunc(rec.OnHost, gone) && !slices.ContainsFunc(rec.Uncertain, gone) {
			continue
		}
		rec.OnHost, rec.Uncertain = slices.DeleteFunc(slices.Clone(rec.OnHost), gone), slices.DeleteFunc(slices.Clone(rec.Uncertain), gone)
		if err := r.Put(rec); err != nil {
			log.Warn("a record of the front is not up to date", zap.Error(err))
		}
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
