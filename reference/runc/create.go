package runc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"slices"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/fsmount"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

// creator prepares the deferred volumes of one container for runc.
type creator struct {
	cfg     Config
	runtime string
	in      handler.Invocation
	report  handler.Reporter
}

// prepare leaves this thread in a mount namespace in which the sources of the deferred mounts
// are the volumes themselves. For a container without deferred volumes it does nothing.
func (c *creator) prepare() error {
	spec, err := handler.ReadSpec(c.in.Bundle)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // runc reports the error better
	}
	if err != nil {
		return err // a runtime that can read it would show the guards
	}
	sandbox, known := oci.SandboxOf(spec)
	found, err := oci.Find(oci.Config{Root: c.cfg.Root}, spec, sandbox.PodUID)
	if err != nil || len(found) == 0 {
		return err
	}
	var process pause // its mount namespace has the pod's volumes
	if known && !sandbox.Self {
		process, err = sandboxProcess(c.runtime, c.in, sandbox)
	} else {
		err = errors.New("it mounts a deferred volume, and has no sandbox that could hold it: only a pod's containers can")
	}
	if err == nil {
		err = checkMounts(c.runtime, spec, found)
	}
	if err == nil {
		err = c.mount(process, sandbox.ID, found)
	}
	if err := errors.Join(err, handler.CloseAll(found)); err != nil {
		return err
	}
	return c.mountOverSources(spec, sandbox.PodUID, process, len(found))
}

// mount mounts every volume in the sandbox, and records that for the broker.
func (c *creator) mount(process pause, sandbox string, found []*oci.Mount) error {
	binding := oci.Binding{Sandbox: sandbox, Program: c.cfg.Program}
	if c.cfg.Agent {
		binding.Socket = c.cfg.AgentSocket()
	}
	if err := handler.Attach(found, binding, process, func(m *oci.Mount) error { return process.ensure(m, c.report.Warn) }); err != nil {
		return err
	}
	if c.cfg.Agent {
		if err := startAgent(c.cfg); err != nil {
			c.report.Warn(err.Error())
		}
	}
	return nil
}

// mountOverSources finds the mounts again in a mount namespace of this thread, which nobody
// else changes, and mounts each volume over its source.
func (c *creator) mountOverSources(spec *specs.Spec, podUID string, process pause, expected int) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("no mount namespace can be made: %w", err)
	}
	// The node sees nothing that is mounted here, and the containers still see what it mounts.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("the mount namespace cannot be cut off from the node: %w", err)
	}
	found, err := oci.Find(oci.Config{Root: c.cfg.Root}, spec, podUID)
	if err != nil {
		return err
	}
	if len(found) != expected {
		return errors.Join(errors.New("its deferred volumes changed while it was being set up: try again"), handler.CloseAll(found))
	}
	for _, m := range found {
		if err := process.show(m); err != nil {
			return errors.Join(handler.VolumeError(m, err), handler.CloseAll(found))
		}
	}
	failpoint.Hit("crust-runc-placed")
	return errors.Join(c.restrict(spec, found), handler.CloseAll(found))
}

// checkMounts refuses mounts that could not be made as requested.
func checkMounts(runtime string, spec *specs.Spec, found []*oci.Mount) error {
	if err := handler.RefuseShared(spec); err != nil {
		return err
	}
	users := spec.Linux != nil && slices.ContainsFunc(spec.Linux.Namespaces, func(ns specs.LinuxNamespace) bool {
		return ns.Type == specs.UserNamespace
	})
	mapped := false
	for _, m := range found {
		mount := spec.Mounts[m.Index]
		isMapped, err := isMapped(mount, users)
		if err != nil {
			return handler.VolumeError(m, err)
		}
		mapped = mapped || isMapped
	}
	if !mapped {
		return nil
	}
	return checkIDMapSupport(runtime)
}

// isMapped reports whether runc has to map the owners of a mount's files, which it does with
// the mappings of the mount. In a pod with a user namespace it must.
func isMapped(mount specs.Mount, users bool) (bool, error) {
	is := len(mount.UIDMappings) > 0 && len(mount.GIDMappings) > 0
	if users && !is {
		return false, errors.New("the pod has a user namespace, and its mount has no ID mappings, without which the files " +
			"would be nobody's: update the container runtime, or set hostUsers to true")
	}
	return is, nil
}

const featuresTime = 10 * time.Second

// checkIDMapSupport fails if runc does not support ID mappings, which it would then ignore.
func checkIDMapSupport(runtime string) error {
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

// ensure mounts the volume in the sandbox, unless it is mounted. Everything that changes the filesystem is done before
// the mount is visible: if this process is killed, no mount is left, and the next attempt repeats all of it.
func (p pause) ensure(m *oci.Mount, warn func(string)) error {
	volume, info := m.Volume, m.Info
	lock, err := p.lockVolumesDir()
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(lock) }()
	if there, err := p.openVolume(volume, info); err == nil {
		return unix.Close(there)
	} else if !errors.Is(err, unix.ENOENT) {
		return err
	}
	device, err := handler.OpenPublished(m.Dir(), info, handler.OpenDevice)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(device) }()
	if !info.ReadOnly() {
		if err := handler.RefuseMounted(info); err != nil {
			return err
		}
	}
	mount, err := fsmount.Mount(info, device, warn)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(mount) }()
	failpoint.Hit("crust-runc-mounted")
	return attachWithGroup(p, lock, mount, volume, info)
}
