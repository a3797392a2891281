package kata

import (
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Scan reads the volumes of all programs, as azuredisk's Kata mode does at each of its publishes and stats:
// there one directory that it cannot read fails the call. A volume that goes meanwhile is no error, but one
// that is there has a whole mountInfo.json.
func Scan(directVolumes string) (volumes int, err error) {
	entries, err := os.ReadDir(directVolumes)
	if err != nil {
		return 0, err
	}
	for _, entry := range entries {
		target, err := base64.URLEncoding.DecodeString(entry.Name())
		if err != nil || VolumeDir(directVolumes, string(target)) != filepath.Join(directVolumes, entry.Name()) {
			return 0, fmt.Errorf("the directory %q is not named by a target: %w", entry.Name(), err)
		}
		before, err := os.Stat(filepath.Join(directVolumes, entry.Name()))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return 0, err
		}
		info, err := (&VM{DirectVolumes: directVolumes, Flavor: Rust}).infoOf(string(target))
		if err != nil {
			return 0, fmt.Errorf("volume %s: %w", target, err)
		}
		// The number of a directory that went may be another's, but not at the same time.
		after, err := os.Stat(filepath.Join(directVolumes, entry.Name()))
		if info == nil && err == nil && os.SameFile(before, after) && before.ModTime().Equal(after.ModTime()) {
			return 0, fmt.Errorf("volume %s has a directory and no mountInfo.json", target)
		}
		volumes++
	}
	return volumes, nil
}
