package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// container is one that the handler runs.
type container struct {
	n   *node
	id  string
	pid string
}

const (
	// runTime bounds one call of the handler.
	runTime = 2 * time.Minute
	// endsWithin bounds the wait for a killed container.
	endsWithin = 20 * time.Second
)

// ending is how a program ended.
type ending struct {
	code           int
	stdout, stderr string
}

// runtime runs the handler. What it starts keeps its streams open, so that they are
// files, and not pipes whose end would be waited for.
func (n *node) runtime(ctx context.Context, words ...string) (ending, error) {
	ctx, cancel := context.WithTimeout(ctx, runTime)
	defer cancel()
	args := append(append([]string{}, n.opts.Args...), "--root", n.path("state"))
	cmd := exec.CommandContext(ctx, n.opts.Runtime, append(args, words...)...) //nolint:gosec // the program that is tried
	cmd.Stdin = n.stdin
	return n.capture(ctx, cmd)
}

// capture runs a program in a process group of its own: an interrupt at the
// terminal is ours alone.
func (n *node) capture(ctx context.Context, cmd *exec.Cmd) (ending, error) {
	out, err := n.outputFile()
	if err != nil {
		return ending{}, err
	}
	defer func() { _ = out.Close() }()
	told, err := n.outputFile()
	if err != nil {
		return ending{}, err
	}
	defer func() { _ = told.Close() }()
	cmd.Stdout, cmd.Stderr = out, told
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		return ending{}, fmt.Errorf("%s cannot be run: %w", cmd.Path, err)
	}
	if err := ctx.Err(); err != nil {
		return ending{}, fmt.Errorf("%s did not end in time: %w", strings.Join(cmd.Args, " "), err)
	}
	return ending{code: cmd.ProcessState.ExitCode(), stdout: content(out), stderr: strings.TrimSpace(content(told))}, nil
}

// outputFile is a file that nobody else can see, and that goes with its last user.
func (n *node) outputFile() (*os.File, error) {
	file, err := os.CreateTemp(n.dir, "output-")
	if err != nil {
		return nil, err
	}
	return file, os.Remove(file.Name())
}

// mostOutput bounds what is read of a program's output.
const mostOutput = 1 << 20

func content(file *os.File) string {
	text := make([]byte, mostOutput)
	read, err := file.ReadAt(text, 0)
	if read == 0 && err != nil {
		return ""
	}
	return string(text[:read])
}

// must runs a command of the handler that has to succeed.
func (n *node) must(ctx context.Context, words ...string) (string, error) {
	ended, err := n.runtime(ctx, words...)
	if err == nil && ended.code != 0 {
		err = fmt.Errorf("%s: status %d: %s", words[0], ended.code, lastLine(ended.stderr))
	}
	return ended.stdout, err
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

// prepare writes its bundle. The container is removed in the end, whether it came
// to be or not.
func (c *container) prepare(spec *specs.Spec) (bundle string, err error) {
	bundle, err = c.n.writeBundle(c.id, spec)
	if err != nil {
		return "", err
	}
	c.n.later(func(ctx context.Context) error {
		return errors.Join(c.removeByForce(ctx), os.RemoveAll(bundle))
	})
	return bundle, nil
}

// create asks for the container.
func (c *container) create(ctx context.Context, spec *specs.Spec) (ending, error) {
	bundle, err := c.prepare(spec)
	if err != nil {
		return ending{}, err
	}
	return c.n.runtime(ctx, "create", "--bundle", bundle, c.id)
}

// run creates and starts it.
func (c *container) run(ctx context.Context, spec *specs.Spec) error {
	bundle, err := c.prepare(spec)
	if err != nil {
		return err
	}
	return c.runPrepared(ctx, bundle)
}

func (c *container) runPrepared(ctx context.Context, bundle string) error {
	ended, err := c.n.runtime(ctx, "create", "--bundle", bundle, c.id)
	if err != nil {
		return err
	}
	if ended.code != 0 {
		return fmt.Errorf("create: status %d: %s", ended.code, lastLine(ended.stderr))
	}
	if _, err := c.n.must(ctx, "start", c.id); err != nil {
		return err
	}
	state, err := c.state(ctx)
	if err != nil {
		return err
	}
	c.pid = strconv.Itoa(state.PID)
	return nil
}

type state struct {
	PID    int    `json:"pid"`
	Status string `json:"status"`
}

func (c *container) state(ctx context.Context) (state, error) {
	var is state
	out, err := c.n.must(ctx, "state", c.id)
	if err != nil {
		return is, err
	}
	if err := json.Unmarshal([]byte(out), &is); err != nil {
		return is, fmt.Errorf("state: %w", err)
	}
	return is, nil
}

// exec runs the probe in the container.
func (c *container) exec(ctx context.Context, words ...string) (string, error) {
	args := append([]string{"exec", c.id, "/probe", ProbeWord}, words...)
	ended, err := c.n.runtime(ctx, args...)
	if err == nil && ended.code != 0 {
		err = fmt.Errorf("%s in the container: %s", strings.Join(words, " "), lastLine(ended.stderr))
	}
	return ended.stdout, err
}

// ask runs the probe and reads its answer.
func ask[T any](ctx context.Context, c *container, words ...string) (answer T, err error) {
	out, err := c.exec(ctx, words...)
	if err != nil {
		return answer, err
	}
	if err := json.Unmarshal([]byte(out), &answer); err != nil {
		return answer, fmt.Errorf("%s in the container: %w", words[0], err)
	}
	return answer, nil
}

// kill kills it and waits for its end.
func (c *container) kill(ctx context.Context, signal syscall.Signal) error {
	if _, err := c.n.must(ctx, "kill", c.id, strconv.Itoa(int(signal))); err != nil {
		return err
	}
	return eventually(ctx, endsWithin, func(ctx context.Context) error {
		is, err := c.state(ctx)
		if err == nil && is.Status != "stopped" {
			err = fmt.Errorf("the container is %s after it was killed", is.Status)
		}
		return err
	})
}

func (c *container) remove(ctx context.Context) error {
	_, err := c.n.must(ctx, "delete", c.id)
	return err
}
