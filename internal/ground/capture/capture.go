// Package capture takes down what a program says: in memory that takes only so
// much, and not through a pipe that a child of the program could hold open.
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

// Output is what a program said, and the signal that ended it, or 0.
type Output struct {
	Stdout, Stderr string
	// Full: there was no room for all of Stdout.
	Full   bool
	Signal syscall.Signal
}

// Run runs a program with nothing of our environment, and takes down what it says. That
// it fails is no error. The function start is (*exec.Cmd).Start, or does more.
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
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		out.Signal = status.Signal()
	}
	if out.Stdout, out.Full, err = Text(stdout); err != nil {
		return out, err
	}
	out.Stderr, _, err = Text(stderr)
	return out, err
}

// New is a file for a program to write to. What is written beyond limit is
// refused to the writer.
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

// Holding is a file for a program to read.
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

// Text is what was written up to now; full tells that there was no room for more.
func Text(file *os.File) (said string, full bool, err error) {
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
