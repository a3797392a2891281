package runc

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/fsmount"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

// restrict adds restrictions of the volumes' mount options, such as nosuid, to the spec: runc mounts the sources again,
// with the options of the spec only. config.json is replaced in this thread's mount namespace only.
func (c *creator) restrict(spec *specs.Spec, found []*oci.Mount) error {
	wanted := make(map[int][]string)
	for _, m := range found {
		options, err := fsmount.Restrictions(m.Info)
		if err != nil {
			return handler.VolumeError(m, err)
		}
		if len(options) > 0 {
			wanted[m.Index] = append(slices.Clone(spec.Mounts[m.Index].Options), options...)
		}
	}
	if len(wanted) == 0 {
		return nil
	}
	name := filepath.Join(c.in.Bundle, handler.SpecFile)
	raw, err := os.ReadFile(name) //nolint:gosec // what runc itself reads
	if err == nil {
		raw, err = withOptions(raw, wanted)
	}
	if err == nil {
		err = c.replace(name, raw)
	}
	if err != nil {
		return fmt.Errorf("runc cannot be given the mount options of the volumes: %w", err)
	}
	return nil
}

// withOptions replaces the options of mounts in a spec. It keeps everything else, also keys of
// later versions of the spec.
func withOptions(raw []byte, wanted map[int][]string) ([]byte, error) {
	var spec map[string]any
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	if err := decoder.Decode(&spec); err != nil {
		return nil, err
	}
	mounts, _ := spec["mounts"].([]any)
	for i, options := range wanted {
		if i >= len(mounts) {
			return nil, errors.New("its mounts have changed meanwhile: try again")
		}
		mount, _ := mounts[i].(map[string]any)
		if mount == nil {
			return nil, fmt.Errorf("its mount %d is not an object", i)
		}
		mount["options"] = options
	}
	return json.Marshal(spec)
}

// replace mounts a file with this content over another one. It is on a tmpfs that is visible in
// this mount namespace only, and ends with it.
func (c *creator) replace(name string, raw []byte) error {
	if err := os.MkdirAll(c.cfg.StateDir, 0o700); err != nil {
		return err
	}
	memory, err := fsops.NewMount("tmpfs", "tmpfs", nil, 0)
	if err != nil {
		return err
	}
	if err := overmountAt(memory, c.cfg.StateDir); err != nil {
		return err
	}
	file := filepath.Join(c.cfg.StateDir, handler.SpecFile)
	if err := os.WriteFile(file, raw, 0o600); err != nil { //nolint:gosec // by our own configuration
		return err
	}
	mount, err := unix.OpenTree(unix.AT_FDCWD, file, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return err
	}
	return overmountAt(mount, name)
}

// overmountAt puts a mount over a file or directory, and closes its descriptor.
func overmountAt(mount int, place string) error {
	over, err := unix.Open(place, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(fsmount.Move(mount, over), unix.Close(over))
	}
	return errors.Join(err, unix.Close(mount))
}
