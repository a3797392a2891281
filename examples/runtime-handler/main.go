// Command runtime-handler is a small runtime handler, to be copied: runc, but deferred volumes are mounted in the
// pod's sandbox, on the host's kernel. It refuses what it cannot do (user namespaces) and says so of what is
// optional (freeze). docs/runtime-authors.md has the rules; the numbers here are those of its sections.
package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/fsmount"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/process"
)

const name, configFile = "runtime-handler", "/etc/runtime-handler.json"

// config has where the directories of volumes are (2), and the program that the broker is told to run (11).
type config struct{ Root, Program string }

func readConfig() (c config, err error) {
	c.Root = abi.DefaultRoot
	err = handler.ReadConfig(os.Getenv("RUNTIME_HANDLER_CONFIG"), configFile, &c, func(string) (err error) {
		c.Program, err = handler.OwnProgram(c.Program)
		return err
	})
	return c, err
}

func main() {
	runtime.LockOSThread() // runc gets this thread's mount namespace
	args := os.Args[1:]
	c, err := readConfig()
	if len(args) > 0 && args[0] == abi.Word { // the program (12)
		os.Exit(handler.CLI{
			Name: name, About: "runtime-handler is runc with deferred volumes.", Config: configFile,
			Open: func() (handler.Volumes, string, error) { return volumes(c), c.Program, err },
		}.Main(args[1:], os.Stdout, os.Stderr))
	}
	in := handler.ParseArgs(args)
	var runc string
	if err == nil {
		runc, err = exec.LookPath("runc")
	}
	if err == nil && slices.Contains([]string{"create", "run", "restore"}, in.Command) {
		err = c.prepare(runc, in)
	}
	if err == nil {
		err = syscall.Exec(runc, append([]string{runc}, args...), os.Environ()) //nolint:gosec // runc with our own arguments
	}
	handler.Reporter{Name: name, In: in, Stderr: os.Stderr}.Fail(err)
	os.Exit(1)
}

// prepare mounts the container's volumes in its sandbox, and then over their guards, which only runc will see.
func (c config) prepare(runc string, in handler.Invocation) error {
	spec, err := handler.ReadSpec(in.Bundle)
	if err != nil {
		return err
	}
	of, known := oci.SandboxOf(spec)
	found, err := oci.Find(oci.Config{Root: c.Root}, spec, of.PodUID) // 6, 10
	if err != nil || len(found) == 0 {
		return err
	}
	defer func() { _ = handler.CloseAll(found) }()
	if err := refuse(spec, found, known && !of.Self); err != nil {
		return err
	}
	s, err := find(runc, in, of)
	if err != nil {
		return err
	}
	binding := oci.Binding{Sandbox: of.ID, Program: c.Program}
	if err := handler.Attach(found, binding, s.Process, s.mount); err != nil { // 7, 11
		return err
	}
	return c.show(in.Bundle, spec, of.PodUID, s)
}

func refuse(spec *specs.Spec, found []*oci.Mount, inSandbox bool) error {
	if !inSandbox {
		return errors.New("a deferred volume needs a sandbox: only the containers of a pod can have one")
	}
	for _, m := range found {
		if len(spec.Mounts[m.Index].UIDMappings) > 0 {
			return handler.VolumeError(m, errors.New("the owners of its files cannot be mapped: set hostUsers to true"))
		}
	}
	return handler.RefuseShared(spec)
}

// find asks runc for the process of the sandbox, and checks by its bundle that it is one, of the same pod (10).
func find(runc string, in handler.Invocation, of oci.Sandbox) (sandbox, error) {
	args := []string{"state", of.ID}
	if in.Root != "" {
		args = append([]string{"--root", in.Root}, args...)
	}
	var state struct {
		PID            int
		Status, Bundle string
	}
	out, err := exec.Command(runc, args...).Output() //nolint:gosec // runc
	if err == nil {
		err = json.Unmarshal(out, &state)
	}
	if err != nil || !abi.IsSandboxID(of.ID) || state.Status == "stopped" {
		return sandbox{}, fmt.Errorf("sandbox %s does not live: %w", of.ID, cmp.Or(err, process.ErrEnded))
	}
	spec, err := handler.ReadSpec(state.Bundle)
	if err != nil {
		return sandbox{}, err
	}
	if is, known := oci.SandboxOf(spec); !known || !is.Self || is.ID != of.ID || is.PodUID != "" && is.PodUID != of.PodUID {
		return sandbox{}, fmt.Errorf("%s is not the sandbox of pod %s", of.ID, of.PodUID)
	}
	p, err := process.Of(state.PID)
	return sandbox{p}, err
}

// show gives runc a mount namespace of its own, in which the volumes are mounted over their guards. What it mounts
// does not propagate to the node.
func (c config) show(bundle string, spec *specs.Spec, podUID string, s sandbox) error {
	err := unix.Unshare(unix.CLONE_NEWNS)
	if err == nil { // or the node's own mounts would not propagate any more
		err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, "")
	}
	if err != nil {
		return err
	}
	found, err := oci.Find(oci.Config{Root: c.Root}, spec, podUID) // again: descriptors are of one namespace
	restricted := false
	for _, m := range found {
		if err == nil {
			err = s.show(m)
		}
		options, notValid := fsmount.Restrictions(m.Info)
		err = cmp.Or(err, notValid)
		restricted = restricted || len(options) > 0
		spec.Mounts[m.Index].Options = append(spec.Mounts[m.Index].Options, options...)
	}
	if err = errors.Join(err, handler.CloseAll(found)); err != nil || !restricted {
		return err
	}
	// runc would set the attributes of such a mount anew: it gets a spec that names them, which only it sees.
	raw, err := json.Marshal(spec)
	changed := filepath.Join(bundle, "with-volumes.json")
	if err == nil {
		err = os.WriteFile(changed, raw, 0o600)
	}
	if err == nil {
		err = unix.Mount(changed, filepath.Join(bundle, handler.SpecFile), "", unix.MS_BIND, "")
	}
	return err
}
