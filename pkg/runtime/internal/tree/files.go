package tree

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// removeFlat removes a directory of files. It does not descend: it removes an empty
// sub-directory, and fails at any other.
func removeFlat(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return ignoreMissing(err)
	}
	for _, entry := range entries {
		if err := ignoreMissing(os.Remove(filepath.Join(dir, entry.Name()))); err != nil {
			return err
		}
	}
	return ignoreMissing(unix.Rmdir(dir))
}

func ignoreMissing(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// ReadNames lists a directory, at most limit names of it.
func ReadNames(dir string, limit int) ([]string, error) {
	//nolint:gosec // the directories come from the configuration, or were checked
	file, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	names, err := file.Readdirnames(limit)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return names, err
}

// DeviceIn returns the device that a volume's file names, whatever else is in it: the device
// has an owner even if we cannot serve the volume.
func DeviceIn(raw []byte) volume.Device {
	var info struct {
		Device string `json:"device"`
	}
	if err := json.NewDecoder(bytes.NewReader(raw)).Decode(&info); err != nil || !path.IsAbs(info.Device) {
		return volume.Device{}
	}
	return claim.Identify(path.Clean(info.Device))
}
