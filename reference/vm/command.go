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
	"github.com/crust-proxy/crust-proxy/reference/cgroup"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/process"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// command is one invocation of crust-vm, with runc's command line.
type command struct {
	cfg    Config
	in     handler.Invocation
	report handler.Reporter
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
		return errors.New("it has neither the annotations of a pod's sandbox nor those of a container in one: crust-vm runs pods only")
	case of.Self:
		return c.createSandbox(id, bundle)
	default:
		return c.createContainer(id, bundle, of.ID, spec)
	}
}

// createSandbox starts a supervisor and returns when its guest is up.
func (c *command) createSandbox(id, bundle string) error {
	if err := c.cfg.check(); err != nil {
		return err
	}
	if err := os.MkdirAll(c.cfg.StateDir, 0o700); err != nil {
		return err
	}
	if err := c.cfg.removeAbandoned(); err != nil {
		c.report.Warn(err.Error())
	}
	dir := c.cfg.sandbox(id)
	if err := os.Mkdir(string(dir), 0o700); err != nil {
		return err
	}
	shim, err := process.Of(os.Getppid())
	if err != nil {
		return fmt.Errorf("the shim of the sandbox cannot be examined: %w", err)
	}
	pid, err := c.startSupervisor(dir, id, bundle, shim)
	if err != nil {
		return errors.Join(err, dir.remove())
	}
	return c.writePID(pid)
}

func (c *command) startSupervisor(dir sandboxDir, id, bundle string, shim process.Process) (pid int, err error) {
	log, err := os.OpenFile(dir.log(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() { _ = log.Close() }()
	result, ready, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer func() { _ = result.Close() }()
	cmd := selfCommand(superviseCommand, id, bundle, strconv.Itoa(shim.PID), strconv.FormatUint(shim.Start, 10))
	// containerd passes no streams to a sandbox.
	cmd.Stderr, cmd.ExtraFiles = log, []*os.File{ready}
	err = cmd.Start()
	_ = ready.Close()
	if err != nil {
		return 0, err
	}
	if err := waitForReady(result, c.cfg.bootTime()+readyTimeout); err != nil {
		timer := time.AfterFunc(killTimeout, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		timer.Stop()
		return 0, fmt.Errorf("the sandbox's virtual machine: %w", err)
	}
	return cmd.Process.Pid, nil
}

// selfCommand runs this program with other arguments, in a session of its own.
func selfCommand(args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...) //nolint:gosec // this program
	cmd.Args[0], cmd.Dir, cmd.SysProcAttr = name, "/", &syscall.SysProcAttr{Setsid: true}
	return cmd
}

// readyTimeout is the time that a supervisor may take besides the boot.
const readyTimeout = 30 * time.Second

// readyWord is what a supervisor writes when its guest is up. Without a word it was killed.
const readyWord = "ready"

// waitForReady waits until a supervisor has written readyWord, or returns the error that it has written instead.
func waitForReady(result *os.File, timeout time.Duration) error {
	if err := result.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	word, err := io.ReadAll(io.LimitReader(result, 16<<10))
	switch {
	case err != nil:
		return fmt.Errorf("it is not ready after %v: %w", timeout, err)
	case len(word) == 0:
		return errors.New("its supervisor was killed")
	case string(word) != readyWord:
		return errors.New(string(word))
	}
	return nil
}

func (c *command) writePID(pid int) error {
	if file := c.in.Option("pid-file", ""); file != "" {
		return os.WriteFile(file, []byte(strconv.Itoa(pid)), 0o644) //nolint:gosec // as runc does
	}
	return nil
}

// createContainer creates a container in the guest and starts its proxy.
func (c *command) createContainer(id, bundle, sandbox string, spec *specs.Spec) error {
	dir := c.cfg.sandbox(sandbox)
	if _, err := c.cfg.findRecord(id); err == nil {
		return fmt.Errorf("container %s exists already", id)
	} else if !errors.Is(err, errUnknown) {
		return err
	}
	// With the record, a container that is only half created when this process is killed can be deleted.
	r := &record{ID: id, Sandbox: sandbox, Bundle: bundle, Group: cgroup.Path(spec.Linux.CgroupsPath)}
	if err := c.cfg.createRecord(r); err != nil {
		return err
	}
	reply, err := call(dir, (*supervisor).AddContainer, &wire.AddContainerRequest{Container: id, Bundle: bundle})
	for _, text := range reply.GetWarnings() {
		c.report.Warn(text)
	}
	if err != nil {
		return errors.Join(err, c.cfg.deleteRecord(r))
	}
	pid, err := c.startProxy(r, spec.Process.Terminal, "")
	if err == nil {
		r.Process, err = process.Of(pid)
	}
	if err == nil {
		err = c.cfg.writeRecord(r)
	}
	if err != nil {
		_, undoErr := call(dir, (*supervisor).DeleteProcess, &wire.DeleteProcessRequest{Process: &wire.Process{Container: id}})
		return errors.Join(err, undoErr, c.cfg.deleteRecord(r))
	}
	return c.writePID(pid)
}

// startProxy starts the proxy of a process in the guest. The proxy inherits the streams of this
// process, or gets a terminal, whose other end is sent to --console-socket.
func (c *command) startProxy(r *record, terminal bool, process string) (pid int, err error) {
	cmd := selfCommand(attachCommand, r.Sandbox, r.ID, process)
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
	if err := cgroup.Join(cmd.Process.Pid, r.Group); err != nil {
		return 0, errors.Join(err, cmd.Process.Kill(), cmd.Process.Release())
	}
	return cmd.Process.Pid, nil
}

func (c *command) start() error {
	r, err := c.cfg.findRecord(c.in.Words[0])
	if err != nil {
		return err
	}
	if !r.isSandbox() {
		if _, err := call(c.cfg.sandbox(r.Sandbox), (*supervisor).StartContainer, &wire.StartContainerRequest{Container: r.ID}); err != nil {
			return err
		}
	}
	r.Started = true
	return c.cfg.writeRecord(r)
}

func (c *command) state() error {
	r, err := c.cfg.findRecord(c.in.Words[0])
	if err != nil {
		return err
	}
	is := specs.State{Version: "1.0.2", ID: r.ID, Status: specs.ContainerState(r.status()), Bundle: r.Bundle}
	if is.Status != specs.StateStopped {
		is.Pid = r.Process.PID
	}
	return json.NewEncoder(c.stdout).Encode(is)
}

// errNotRunning has the text of runc's error, which containerd searches for.
var errNotRunning = errors.New("container not running")

func (c *command) kill() error {
	r, err := c.cfg.findRecord(c.in.Words[0])
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
	dir := c.cfg.sandbox(r.Sandbox)
	if r.isSandbox() {
		// A sandbox has no process to be signalled: every signal ends it.
		err = dir.end(c.cfg.hangTime())
	} else {
		_, err = callWithin(c.cfg.hangTime(), dir, (*supervisor).SignalProcess, &wire.SignalProcessRequest{
			Process: &wire.Process{Container: r.ID}, Signal: uint32(number), All: c.in.Has("all", "a"),
		})
	}
	// When the machine has just ended, the proxy is about to end, too.
	if err != nil && waitEnded(r.Process, proxyEndTimeout) {
		return errNotRunning
	}
	if number == unix.SIGKILL && errors.Is(err, errUnanswered) {
		return c.killUnanswered(r)
	}
	return err
}

// killUnanswered ends a machine whose supervisor hangs, as nobody else would, and then the proxy, which may be stopped.
func (c *command) killUnanswered(r *record) error {
	sandbox, err := c.cfg.findRecord(r.Sandbox)
	if err == nil {
		err = kill(sandbox.Process, killTimeout)
	}
	if err != nil && !errors.Is(err, errUnknown) {
		return err // the container may run
	}
	return kill(r.Process, killTimeout)
}

// proxyEndTimeout is how long a proxy may take to end after its machine has ended.
const proxyEndTimeout = 3 * time.Second

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
	r, err := c.cfg.findRecord(c.in.Words[0])
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
	sandbox, err := c.cfg.findRecord(r.Sandbox)
	if err != nil && !errors.Is(err, errUnknown) {
		return err // the container may run
	}
	if err == nil && !sandbox.Process.Ended() {
		_, err := call(c.cfg.sandbox(r.Sandbox), (*supervisor).DeleteProcess, &wire.DeleteProcessRequest{Process: &wire.Process{Container: r.ID}})
		if err != nil && !waitEnded(sandbox.Process, proxyEndTimeout) {
			return err
		}
	}
	// The process in the guest has ended, so its proxy is about to end.
	if err := kill(r.Process, killTimeout); err != nil {
		return err
	}
	return c.cfg.deleteRecord(r)
}

// deleteSandbox lets the guest shut down in order; the supervisor bounds the time for it.
func (c *command) deleteSandbox(r *record) error {
	dir := c.cfg.sandbox(r.ID)
	if !r.Process.Ended() && dir.end(c.cfg.hangTime()) == nil {
		waitEnded(r.Process, shutdownTimeout+powerOffTimeout+killTimeout)
	}
	if err := kill(r.Process, killTimeout); err != nil {
		return err
	}
	return dir.remove()
}
