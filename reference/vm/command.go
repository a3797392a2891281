package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/process"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// command is one of runc's.
type command struct {
	cfg    Config
	in     handler.Invocation
	tell   handler.Teller
	stdout io.Writer
}

func (c *command) create() error {
	id := c.in.Words[0]
	if !abi.IsSandboxID(id) {
		return fmt.Errorf("%q cannot be the id of a container", id)
	}
	bundle, err := filepath.Abs(c.in.Bundle)
	if err != nil {
		return err
	}
	spec, err := readSpec(bundle)
	if err != nil {
		return err
	}
	of, known := oci.SandboxOf(spec)
	switch {
	case !known || !abi.IsSandboxID(of.ID) || of.Self != (of.ID == id):
		return errors.New("it has not the annotations of a pod's sandbox, nor of a container in one: crust-vm runs pods only")
	case of.Self:
		return c.createSandbox(id, bundle)
	default:
		return c.createContainer(id, bundle, of.ID, spec)
	}
}

// createSandbox starts a supervisor, and returns when its guest is up.
func (c *command) createSandbox(id, bundle string) error {
	if err := c.cfg.check(); err != nil {
		return err
	}
	if c.cfg.Virtiofsd == "" {
		c.tell.Warn("there is no virtiofsd: containers get copies of their root filesystems and mounts")
	}
	if err := c.cfg.sweep(); err != nil {
		c.tell.Warn(err.Error())
	}
	place := c.cfg.sandbox(id)
	if err := os.MkdirAll(c.cfg.StateDir, 0o700); err != nil {
		return err
	}
	if err := os.Mkdir(string(place), 0o700); err != nil {
		return err
	}
	shim, err := process.Of(os.Getppid())
	if err != nil {
		return fmt.Errorf("whose sandbox it is cannot be told: %w", err)
	}
	pid, err := c.startSupervisor(place, id, bundle, shim)
	if err != nil {
		return errors.Join(err, place.remove())
	}
	return c.writePID(pid)
}

func (c *command) startSupervisor(place place, id, bundle string, shim process.Process) (pid int, err error) {
	log, err := os.OpenFile(place.log(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() { _ = log.Close() }()
	told, ready, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer func() { _ = told.Close() }()
	cmd := ourselves(superviseArgs(id, bundle, shim)...)
	// The sandbox's streams are nobody's: containerd gives it none.
	cmd.Stderr, cmd.ExtraFiles = log, []*os.File{ready}
	err = cmd.Start()
	_ = ready.Close()
	if err != nil {
		return 0, err
	}
	err = awaitReady(told, c.cfg.bootTime()+readyTime)
	if err != nil {
		late := time.AfterFunc(endTime, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		late.Stop()
		return 0, fmt.Errorf("the sandbox's virtual machine: %w", err)
	}
	return cmd.Process.Pid, nil
}

// ourselves is this program with other arguments, in a session of its own.
func ourselves(args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...) //nolint:gosec // this program
	cmd.Args[0], cmd.Dir, cmd.SysProcAttr = name, "/", &syscall.SysProcAttr{Setsid: true}
	return cmd
}

// readyTime is for what a supervisor does besides booting.
const readyTime = 30 * time.Second

// readyWord is what a supervisor says whose guest is up. One that was killed says nothing.
const readyWord = "ready"

// awaitReady waits for a supervisor's word.
func awaitReady(told *os.File, most time.Duration) error {
	if err := told.SetReadDeadline(time.Now().Add(most)); err != nil {
		return err
	}
	said, err := io.ReadAll(io.LimitReader(told, 16<<10))
	switch {
	case err != nil:
		return fmt.Errorf("it is not ready after %v: %w", most, err)
	case len(said) == 0:
		return errors.New("its supervisor was killed")
	case string(said) != readyWord:
		return errors.New(string(said))
	}
	return nil
}

func (c *command) writePID(pid int) error {
	if file := c.in.Option("pid-file", ""); file != "" {
		return os.WriteFile(file, []byte(strconv.Itoa(pid)), 0o644) //nolint:gosec // as runc does
	}
	return nil
}

// createContainer has the guest make a container, and starts its proxy.
func (c *command) createContainer(id, bundle, sandbox string, spec *specs.Spec) error {
	place := c.cfg.sandbox(sandbox)
	if _, err := c.cfg.find(id); err == nil {
		return fmt.Errorf("container %s is there already", id)
	}
	// Whoever kills us can have deleted what was made until then.
	r := &record{ID: id, Sandbox: sandbox, Bundle: bundle, Group: groupOf(spec)}
	if err := c.cfg.write(r); err != nil {
		return err
	}
	made, err := call(place, (*supervisor).AddContainer, &wire.AddContainerRequest{Container: id, Bundle: bundle})
	for _, text := range made.GetWarnings() {
		c.tell.Warn(text)
	}
	if err != nil {
		return errors.Join(err, c.cfg.forget(r))
	}
	pid, err := c.startProxy(r, spec.Process.Terminal, "")
	if err == nil {
		r.Process, err = process.Of(pid)
	}
	if err == nil {
		err = c.cfg.write(r)
	}
	if err != nil {
		_, undo := call(place, (*supervisor).DeleteProcess, &wire.DeleteProcessRequest{Process: &wire.Process{Container: id}})
		return errors.Join(err, undo, c.cfg.forget(r))
	}
	return c.writePID(pid)
}

// startProxy starts a process that stands for one in the guest. It has our streams, or
// a terminal, whose other end goes where the caller wants it.
func (c *command) startProxy(r *record, terminal bool, process string) (pid int, err error) {
	cmd := ourselves(attachCommand, r.Sandbox, r.ID, process)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if terminal {
		slave, err := sendTerminal(c.in.Option("console-socket", ""))
		if err != nil {
			return 0, fmt.Errorf("the terminal: %w", err)
		}
		defer func() { _ = slave.Close() }()
		cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
		cmd.SysProcAttr.Setctty = true
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	if err := r.join(cmd.Process.Pid); err != nil {
		return 0, errors.Join(err, cmd.Process.Kill(), cmd.Process.Release())
	}
	return cmd.Process.Pid, nil
}

func (c *command) start() error {
	r, err := c.cfg.find(c.in.Words[0])
	if err != nil {
		return err
	}
	if !r.isSandbox() {
		_, err := call(c.cfg.sandbox(r.Sandbox), (*supervisor).StartContainer, &wire.StartContainerRequest{Container: r.ID})
		if err != nil {
			return err
		}
	}
	r.Started = true
	return c.cfg.write(r)
}

func (c *command) state() error {
	r, err := c.cfg.find(c.in.Words[0])
	if err != nil {
		return err
	}
	is := specs.State{Version: "1.0.2", ID: r.ID, Status: specs.ContainerState(r.status()), Bundle: r.Bundle}
	if is.Status != specs.StateStopped {
		is.Pid = r.Process.PID
	}
	return json.NewEncoder(c.stdout).Encode(is)
}

// errNotRunning is what runc says, and what containerd looks for.
var errNotRunning = errors.New("container not running")

func (c *command) kill() error {
	r, err := c.cfg.find(c.in.Words[0])
	if err != nil {
		return err
	}
	number := unix.SIGTERM
	if len(c.in.Words) > 1 {
		if number, err = parseSignal(c.in.Words[1]); err != nil {
			return err
		}
	}
	if r.status() == string(specs.StateStopped) {
		return errNotRunning
	}
	place := c.cfg.sandbox(r.Sandbox)
	if r.isSandbox() {
		// A sandbox has no process that could take a signal: any of them ends it.
		_, err = call(place, (*supervisor).EndSandbox, new(wire.EndSandboxRequest))
	} else {
		_, err = call(place, (*supervisor).SignalProcess, &wire.SignalProcessRequest{
			Process: &wire.Process{Container: r.ID}, Signal: uint32(number), All: c.in.Has("all", "a"),
		})
	}
	// Where the machine has just gone, the proxy of its process goes, too.
	if err != nil && gone(r.Process, goneTime) {
		return errNotRunning
	}
	return err
}

// goneTime is how long the end of a machine takes to be seen.
const goneTime = 3 * time.Second

func parseSignal(word string) (syscall.Signal, error) {
	if n, err := strconv.Atoi(word); err == nil && n > 0 && n < 65 {
		return syscall.Signal(n), nil
	}
	word = strings.ToUpper(word)
	if n := unix.SignalNum("SIG" + strings.TrimPrefix(word, "SIG")); n != 0 {
		return n, nil
	}
	return 0, fmt.Errorf("%q is not a signal", word)
}

func (c *command) delete() error {
	force := c.in.Has("force", "f")
	r, err := c.cfg.find(c.in.Words[0])
	if errors.Is(err, errUnknown) && force {
		return nil
	}
	if err != nil {
		return err
	}
	if !force && r.status() != string(specs.StateStopped) {
		return fmt.Errorf("container %s is %s: it cannot be deleted", r.ID, r.status())
	}
	if r.isSandbox() {
		return c.deleteSandbox(r)
	}
	sandbox, err := c.cfg.find(r.Sandbox)
	if err == nil && !sandbox.Process.Ended() {
		_, err := call(c.cfg.sandbox(r.Sandbox), (*supervisor).DeleteProcess, &wire.DeleteProcessRequest{Process: &wire.Process{Container: r.ID}})
		if err != nil && !gone(sandbox.Process, goneTime) {
			return err
		}
	}
	// The process in the guest has ended, and its proxy ends by that.
	if err := end(r.Process, endTime); err != nil {
		return err
	}
	return c.cfg.forget(r)
}

// deleteSandbox lets the guest end in order, within bounds that the supervisor keeps.
func (c *command) deleteSandbox(r *record) error {
	place := c.cfg.sandbox(r.ID)
	if !r.Process.Ended() {
		if _, err := call(place, (*supervisor).EndSandbox, new(wire.EndSandboxRequest)); err == nil {
			gone(r.Process, shutdownTime+powerTime+endTime)
		}
	}
	if err := end(r.Process, endTime); err != nil {
		return err
	}
	return place.remove()
}
