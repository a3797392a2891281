package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

func readSpec(bundle string) (*specs.Spec, error) {
	spec, err := handler.ReadSpec(bundle)
	if err == nil && (spec.Root == nil || spec.Process == nil || spec.Linux == nil) {
		err = errors.New("the bundle's config.json has no root, no process or no linux")
	}
	return spec, err
}

// guestSpec converts a container's spec into the guest's, and returns which files the guest needs for it.
func guestSpec(id, bundle string, spec *specs.Spec, found []*oci.Mount) (raw []byte, binds []bind, err error) {
	if err := checkSpec(spec); err != nil {
		return nil, nil, err
	}
	inGuest := *spec
	root := *spec.Root
	source := root.Path
	if !filepath.IsAbs(source) {
		source = filepath.Join(bundle, source)
	}
	name := path.Join(id, "rootfs")
	root.Path, inGuest.Root = path.Join(wire.SharedDir, name), &root
	binds = append(binds, bind{name: name, source: source})
	inGuest.Mounts = slices.Clone(spec.Mounts)
	for i := range inGuest.Mounts {
		m := &inGuest.Mounts[i]
		has := func(options ...string) bool {
			return slices.ContainsFunc(options, func(o string) bool { return slices.Contains(m.Options, o) })
		}
		switch {
		case slices.ContainsFunc(found, func(f *oci.Mount) bool { return f.Index == i }):
			m.Source = ""
		case m.Type == "bind" || has("bind", "rbind"):
			name := path.Join(id, strconv.Itoa(i))
			binds = append(binds, bind{
				name: name, source: m.Source, readOnly: has("ro", "rro"), recursive: has("rro"),
				slave: has("rslave", "slave"),
			})
			m.Source = path.Join(wire.SharedDir, name)
		}
	}
	linux := *spec.Linux
	linux.Seccomp, linux.CgroupsPath = nil, ""
	inGuest.Linux, inGuest.Annotations = &linux, nil
	raw, err = json.Marshal(inGuest)
	return raw, binds, err
}

// checkSpec refuses what crust-vm does not support and the container cannot do without.
func checkSpec(spec *specs.Spec) error {
	if spec.Hooks != nil {
		h := spec.Hooks
		if len(h.Prestart)+len(h.CreateRuntime)+len(h.CreateContainer)+len(h.StartContainer)+len(h.Poststart)+len(h.Poststop) > 0 { //nolint:staticcheck // also the deprecated hooks
			return errors.New("it has hooks, which crust-vm does not run: they would act on the host, and the container is in a virtual machine")
		}
	}
	if len(spec.Linux.Devices) > 0 {
		return fmt.Errorf("it has the device %s of the host, which a virtual machine does not have: set privileged_without_host_devices, "+
			"or do not use runtime class crust-vm", spec.Linux.Devices[0].Path)
	}
	for _, ns := range spec.Linux.Namespaces {
		if ns.Type == specs.UserNamespace {
			return errors.New("its pod has a user namespace, which crust-vm does not make: set hostUsers to true")
		}
	}
	for _, m := range spec.Mounts {
		if slices.Contains(m.Options, "rshared") || slices.Contains(m.Options, "shared") {
			return fmt.Errorf("what is mounted below its mount at %s cannot be seen outside of the virtual machine: "+
				"set mountPropagation to HostToContainer or None", m.Destination)
		}
		if len(m.UIDMappings)+len(m.GIDMappings) > 0 {
			return fmt.Errorf("its mount at %s maps owners, which crust-vm does not: set hostUsers to true", m.Destination)
		}
	}
	return nil
}
