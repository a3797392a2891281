package runc

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
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
