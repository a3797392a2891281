package handler

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
)

// SpecFile is the name of the spec in a container's bundle.
const SpecFile = "config.json"

// ReadSpec reads the spec of a container's bundle.
func ReadSpec(bundle string) (*specs.Spec, error) {
	raw, err := os.ReadFile(filepath.Join(bundle, SpecFile)) //nolint:gosec // what every runtime reads
	if err != nil {
		return nil, err
	}
	spec := new(specs.Spec)
	if err := json.Unmarshal(raw, spec); err != nil {
		return nil, fmt.Errorf("the bundle's %s: %w", SpecFile, err)
	}
	return spec, nil
}

// Attach calls mount once for each volume that a container mounts, and tells the broker that
// the sandbox has it. process is the note by which the sandbox is known again.
func Attach(found []*oci.Mount, binding oci.Binding, process any, mount func(volume string, info abi.Info) error) (err error) {
	if binding.Note, err = json.Marshal(process); err != nil {
		return err
	}
	done := make(map[string]bool)
	for _, m := range found {
		if done[m.Volume] {
			continue
		}
		done[m.Volume] = true
		if err := mount(m.Volume, m.Info); err != nil {
			return VolumeError(m, err)
		}
		failpoint.Hit("volume-attached")
		if err := m.Bind(binding); err != nil {
			return VolumeError(m, fmt.Errorf("the broker cannot be told of the sandbox: %w", err))
		}
		failpoint.Hit("volume-bound")
	}
	return nil
}

// RefuseShared refuses mounts of volumes in which the node is to see what is mounted.
func RefuseShared(spec *specs.Spec, found []*oci.Mount) error {
	for _, m := range found {
		options := spec.Mounts[m.Index].Options
		if slices.Contains(options, "rshared") || slices.Contains(options, "shared") {
			return VolumeError(m, errors.New("what is mounted in it cannot be seen outside of the container, as the volume is not there: "+
				"set mountPropagation to HostToContainer or None, or do not defer the volume"))
		}
	}
	return nil
}

// CloseAll closes what was found.
func CloseAll(found []*oci.Mount) error {
	var errs []error
	for _, m := range found {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// VolumeError names the volume of a mount in an error.
func VolumeError(m *oci.Mount, err error) error {
	name := m.Info.Target()
	if name == "" {
		name = m.Volume
	}
	return fmt.Errorf("volume %s (for %s): %w", name, m.Destination, err)
}
