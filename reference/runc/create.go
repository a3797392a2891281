package runc

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
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
	spec, err := readSpec(c.in.Bundle)
	if err != nil {
		return nil //nolint:nilerr // runc reads it as well, and says better what is wrong
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
	if err := errors.Join(err, closeAll(found)); err != nil {
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

func readSpec(bundle string) (*specs.Spec, error) {
	raw, err := os.ReadFile(filepath.Join(bundle, "config.json")) //nolint:gosec // what runc itself reads
	if err != nil {
		return nil, err
	}
	spec := new(specs.Spec)
	return spec, json.Unmarshal(raw, spec)
}

// mount mounts every volume in the sandbox, and tells the broker.
func (c *creator) mount(process pause, sandbox string, found []*oci.Mount) error {
	note, err := json.Marshal(process)
	if err != nil {
		return err
	}
	binding := oci.Binding{Sandbox: sandbox, Note: note, Program: c.cfg.Program}
	if c.cfg.Agent {
		binding.Socket = c.cfg.AgentSocket()
	}
	done := make(map[string]bool)
	for _, m := range found {
		if done[m.Volume] {
			continue
		}
		done[m.Volume] = true
		if err := process.ensure(m.Volume, m.Info, c.tell.Warn); err != nil {
			return volumeError(m, err)
		}
		failpoint.Hit("crust-runc-attached")
		if err := m.Bind(binding); err != nil {
			return volumeError(m, fmt.Errorf("the broker cannot be told of the sandbox: %w", err))
		}
		failpoint.Hit("crust-runc-bound")
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
		return errors.Join(errors.New("its deferred volumes changed while it was being set up: try again"), closeAll(found))
	}
	for _, m := range found {
		if err := process.show(m); err != nil {
			return errors.Join(volumeError(m, err), closeAll(found))
		}
	}
	failpoint.Hit("crust-runc-placed")
	return closeAll(found)
}

func closeAll(found []*oci.Mount) error {
	var errs []error
	for _, m := range found {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

func volumeError(m *oci.Mount, err error) error {
	name := m.Info.Target()
	if name == "" {
		name = m.Volume
	}
	return fmt.Errorf("volume %s (for %s): %w", name, m.Destination, err)
}
