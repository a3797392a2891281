package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// handlerTimeout bounds one call of the handler.
const handlerTimeout = 2 * time.Minute

// handler is the program that is tested, with runc's command line.
type handler struct {
	program string
	args    []string // before each command
	dir     string   // for the output of programs
	stdin   *os.File // of the containers
}

func newHandler(opts Options, dir, state string, stdin *os.File) *handler {
	return &handler{program: opts.Runtime, args: append(append([]string{}, opts.Args...), "--root", state), dir: dir, stdin: stdin}
}

// run runs one command of the handler.
func (h *handler) run(ctx context.Context, words ...string) (programResult, error) {
	ctx, cancel := context.WithTimeout(ctx, handlerTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, h.program, append(h.args[:len(h.args):len(h.args)], words...)...) //nolint:gosec // the program that is tested
	cmd.Stdin = h.stdin
	return runProgram(ctx, h.dir, cmd)
}

// must runs a command that has to succeed.
func (h *handler) must(ctx context.Context, words ...string) (string, error) {
	got, err := h.run(ctx, words...)
	if err == nil && got.code != 0 {
		err = fmt.Errorf("%s: status %d: %s", words[0], got.code, lastLine(got.stderr))
	}
	return got.stdout, err
}

// programResult is how a program ended, and what it printed.
type programResult struct {
	code           int
	stdout, stderr string
}

// runProgram runs a program in a process group of its own, so that an interrupt at the
// terminal reaches only us. What the program starts keeps its streams open: they are
// files, because the end of a pipe would be waited for.
func runProgram(ctx context.Context, dir string, cmd *exec.Cmd) (programResult, error) {
	stdout, err := outputFile(dir)
	if err != nil {
		return programResult{}, err
	}
	defer func() { _ = stdout.Close() }()
	stderr, err := outputFile(dir)
	if err != nil {
		return programResult{}, err
	}
	defer func() { _ = stderr.Close() }()
	cmd.Stdout, cmd.Stderr = stdout, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		return programResult{}, fmt.Errorf("%s cannot be run: %w", cmd.Path, err)
	}
	if err := ctx.Err(); err != nil {
		return programResult{}, fmt.Errorf("%s did not end in time: %w", strings.Join(cmd.Args, " "), err)
	}
	return programResult{code: cmd.ProcessState.ExitCode(), stdout: content(stdout), stderr: strings.TrimSpace(content(stderr))}, nil
}

// outputFile is a file without a name: it goes when its last user closes it.
func outputFile(dir string) (*os.File, error) {
	file, err := os.CreateTemp(dir, "output-")
	if err != nil {
		return nil, err
	}
	return file, os.Remove(file.Name())
}

// maxOutput bounds what is read of a program's output.
const maxOutput = 1 << 20

func content(file *os.File) string {
	text := make([]byte, maxOutput)
	read, err := file.ReadAt(text, 0)
	if read == 0 && err != nil {
		return ""
	}
	return string(text[:read])
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}
