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
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/fsmount"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

// creator makes the deferred volumes of one container ready for runc.
type creator struct {
	cfg     Config
	runtime string
	in      handler.Invocation
	tell    handler.Teller
}

// prepare leaves this thread in a mount namespace in which the sources of the
// deferred mounts are the volumes themselves. A container without any is left as
// it is.
func (c *creator) prepare() error {
	spec, err := handler.ReadSpec(c.in.Bundle)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // runc says better what is wrong
	}
	if err != nil {
		return err // the runtime may be one that can read it, and would show the guards
	}
	sandbox, known := oci.SandboxOf(spec)
	found, err := oci.Find(oci.Config{Root: c.cfg.Root}, spec, sandbox.PodUID)
	if err != nil || len(found) == 0 {
		return err
	}
	process, err := c.sandbox(sandbox, known)
	if err == nil {
		err = checkMounts(c.runtime, spec, found)
	}
	if err == nil {
		err = c.mount(process, sandbox.ID, found)
	}
	if err := errors.Join(err, handler.CloseAll(found)); err != nil {
		return err
	}
	return c.place(spec, sandbox.PodUID, process, len(found))
}

// sandbox finds the process whose mount namespace holds the pod's volumes.
func (c *creator) sandbox(of oci.Sandbox, known bool) (pause, error) {
	if !known || of.Self {
		return pause{}, errors.New("it mounts a deferred volume, and has no sandbox that could hold it: only a pod's containers can")
	}
	return sandboxProcess(c.runtime, c.in, of)
}

// mount mounts every volume in the sandbox, and tells the broker.
func (c *creator) mount(process pause, sandbox string, found []*oci.Mount) error {
	binding := oci.Binding{Sandbox: sandbox, Program: c.cfg.Program}
	if c.cfg.Agent {
		binding.Socket = c.cfg.AgentSocket()
	}
	if err := handler.Attach(found, binding, process, func(volume string, info abi.Info) error {
		return process.ensure(volume, info, c.tell.Warn)
	}); err != nil {
		return err
	}
	if c.cfg.Agent {
		if err := startAgent(c.cfg); err != nil {
			c.tell.Warn(err.Error())
		}
	}
	return nil
}

// place looks a second time, in a mount namespace of this thread's own, where
// nobody else changes anything, and puts each volume over its source.
func (c *creator) place(spec *specs.Spec, podUID string, process pause, expected int) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("no mount namespace can be made: %w", err)
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

// ensure makes the volume be mounted in the sandbox. Everything that changes the
// filesystem is done before anybody can see it: a kill on the way leaves no mount,
// and the next attempt does all of it again.
func (p pause) ensure(volume string, info abi.Info, warn func(string)) error {
	lock, err := p.preparePlaces()
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(lock) }()
	if there, err := p.has(volume, info); err != nil || there {
		return err
	}
	device, err := handler.OpenDevice(info)
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

// has tells whether the volume is mounted in the sandbox already.
func (p pause) has(volume string, info abi.Info) (bool, error) {
	fd, err := p.open(volume, info)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, unix.Close(fd)
}
