package runc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

// checkMounts refuses mounts that would have less than was asked for.
func checkMounts(runtime string, spec *specs.Spec, found []*oci.Mount) error {
	if err := handler.RefuseShared(spec, found); err != nil {
		return err
	}
	mapped := false
	for _, m := range found {
		mount := spec.Mounts[m.Index]
		isMapped, err := isMapped(mount, hasUserNamespace(spec))
		if err != nil {
			return handler.VolumeError(m, err)
		}
		mapped = mapped || isMapped
	}
	if !mapped {
		return nil
	}
	return mapsOwners(runtime)
}

// isMapped tells whether runc has to map the owners of a mount's files. In a pod with a
// user namespace it must: it does it by the mount's mappings, with the volume that it finds
// in the guard's place.
func isMapped(mount specs.Mount, users bool) (bool, error) {
	is := len(mount.UIDMappings) > 0 && len(mount.GIDMappings) > 0
	if users && !is {
		return false, errors.New("the pod has a user namespace, and its mount has no ID mappings, without which the files " +
			"would be nobody's: update the container runtime, or set hostUsers to true")
	}
	return is, nil
}

func hasUserNamespace(spec *specs.Spec) bool {
	return spec.Linux != nil && slices.ContainsFunc(spec.Linux.Namespaces, func(ns specs.LinuxNamespace) bool {
		return ns.Type == specs.UserNamespace
	})
}

// featuresTime bounds the question for the features of runc.
const featuresTime = 10 * time.Second

// mapsOwners asks runc: one that does not know of mappings leaves them out without a word.
func mapsOwners(runtime string) error {
	ctx, cancel := context.WithTimeout(context.Background(), featuresTime)
	defer cancel()
	out, err := exec.CommandContext(ctx, runtime, "features").Output()
	var can struct {
		Linux struct {
			MountExtensions struct{ IDMap struct{ Enabled bool } }
		}
	}
	if err == nil {
		err = json.Unmarshal(out, &can)
	}
	if err != nil {
		return fmt.Errorf("whether %s can map the owners of files cannot be told: %w", runtime, err)
	}
	if !can.Linux.MountExtensions.IDMap.Enabled {
		return fmt.Errorf("the pod has a user namespace, and %s cannot map the owners of a volume's files for it: "+
			"install runc 1.2 or later, or set hostUsers to true", runtime)
	}
	return nil
}
