// Package capture records the output of a program: in memory of a fixed size, and not through a
// pipe, which a child of the program could hold open.
package capture

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Output is what a program wrote, and how it ended.
type Output struct {
	Stdout, Stderr string
	// Full is set if Stdout was larger than its limit, and is cut off.
	Full bool
	// Code is the exit code, or -1 if a signal ended it, and Signal is that, or 0.
	Code   int
	Signal syscall.Signal
}

// Run runs a program without our environment, and returns its output. The program's own failure
// is no error. The function start is (*exec.Cmd).Start, or does more.
func Run(cmd *exec.Cmd, start func(*exec.Cmd) error, mostStdout, mostStderr int64) (out Output, err error) {
	stdout, err := New(mostStdout)
	if err != nil {
		return out, err
	}
	defer func() { _ = stdout.Close() }()
	stderr, err := New(mostStderr)
	if err != nil {
		return out, err
	}
	defer func() { _ = stderr.Close() }()
	cmd.Dir, cmd.Env = "/", []string{"LC_ALL=C", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	cmd.WaitDelay = time.Second
	if err := start(cmd); err != nil {
		return out, err
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		return out, err
	}
	out.Code = cmd.ProcessState.ExitCode()
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		out.Signal = status.Signal()
	}
	if out.Stdout, out.Full, err = Text(stdout); err != nil {
		return out, err
	}
	out.Stderr, _, err = Text(stderr)
	return out, err
}

// New returns a file for a program to write to. A write beyond the limit fails.
func New(limit int64) (*os.File, error) {
	fd, err := unix.MemfdCreate("output", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "output")
	if err := file.Truncate(limit); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	if _, err := unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// Holding returns a file with a text for a program to read.
func Holding(text string) (*os.File, error) {
	fd, err := unix.MemfdCreate("input", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "input")
	if _, err := file.WriteString(text); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// Text returns what was written until now. It is full if it has reached the limit.
func Text(file *os.File) (text string, full bool, err error) {
	end, err := file.Seek(0, io.SeekCurrent)
	if err != nil {
		return "", false, err
	}
	info, err := file.Stat()
	if err != nil {
		return "", false, err
	}
	raw := make([]byte, min(end, info.Size()))
	if _, err := file.ReadAt(raw, 0); err != nil {
		return "", false, err
	}
	return string(raw), end >= info.Size(), nil
}
