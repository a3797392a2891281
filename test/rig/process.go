package rig

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

const (
	// startTime is how long a process may take until it serves.
	startTime = 3 * time.Minute
	// stopTime is how long one may take to end when it is asked to.
	stopTime = 2 * time.Minute
	// logTail is how much of a log errors show.
	logTail = 6000
)

// Process is a program that serves. It may be stopped, killed and started again at any
// time; its log goes on in the same file. It ends with the process that started it.
type Process struct {
	Name, Program string
	Args          []string
	// Env is added to the environment.
	Env []string
	// LogFile takes what it writes, and is in its working directory.
	LogFile string
	// Ready tells whether it serves; nil means that it does at once.
	Ready func() error
	// Grace is after how long Stop kills it, as kubelet does; 0 is an error after stopTime instead.
	Grace time.Duration

	cmd    *exec.Cmd
	done   chan struct{}
	starts int
}

// Launch starts it and waits for nothing.
func (p *Process) Launch(env ...string) error {
	if p.Alive() {
		return fmt.Errorf("%s runs already", p.Name)
	}
	log, err := os.OpenFile(p.LogFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(p.Program, p.Args...) //nolint:gosec // a program of the caller's
	cmd.Env = append(append(os.Environ(), p.Env...), env...)
	cmd.Dir = filepath.Dir(p.LogFile)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	p.cmd, p.done = cmd, make(chan struct{})
	p.starts++
	go func(done chan struct{}) { _ = cmd.Wait(); close(done) }(p.done)
	return nil
}

// Start starts it and waits until it serves.
func (p *Process) Start() error {
	if err := p.Launch(); err != nil {
		return err
	}
	return p.WaitReady()
}

// WaitReady waits until it serves.
func (p *Process) WaitReady() error {
	if p.Ready == nil {
		return nil
	}
	deadline := time.Now().Add(startTime)
	for pause := 2 * time.Millisecond; ; pause = min(pause*5/4, 20*time.Millisecond) {
		err := p.Ready()
		switch {
		case err == nil:
			return nil
		case !p.Alive():
			return fmt.Errorf("%s ended:\n%s", p.Name, Tail(p.Log()))
		case time.Now().After(deadline):
			return fmt.Errorf("%s does not serve after %v: %w\n%s", p.Name, startTime, err, Tail(p.Log()))
		}
		time.Sleep(pause)
	}
}

// Alive tells whether it runs.
func (p *Process) Alive() bool {
	if p.cmd == nil {
		return false
	}
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Pid is its process, while it runs.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// CPUTime is what a process has used of processors so far, its threads and the kernel for it.
func CPUTime(t T, pid int) time.Duration {
	t.Helper()
	const scheduled = 2 // as in the C library's clock_getcpuclockid
	var used unix.Timespec
	check.Must(t, unix.ClockGettime(int32(^pid<<3|scheduled), &used)) //nolint:gosec // a pid is small
	return time.Duration(used.Nano())
}

// WakeUps returns how often the threads of a process have waited and gone on.
func WakeUps(t T, pid int) (sum int) {
	t.Helper()
	files := check.Value(filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid)))(t)
	for _, file := range files {
		status, _ := os.ReadFile(file) // a thread may end
		if _, rest, found := strings.Cut(string(status), "\nvoluntary_ctxt_switches:"); found {
			count, _, _ := strings.Cut(strings.TrimSpace(rest), "\n")
			sum += check.Value(strconv.Atoi(count))(t)
		}
	}
	return sum
}

// Starts counts how often it was started.
func (p *Process) Starts() int { return p.starts }

// Signal sends a signal to a process that runs.
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Kill kills it with SIGKILL and waits for its end. One that does not run stays so.
func (p *Process) Kill() {
	if p.cmd == nil {
		return
	}
	_ = p.cmd.Process.Kill()
	<-p.done
	p.cmd = nil
}

// Stop asks it to end, and waits.
func (p *Process) Stop() error {
	if !p.Alive() {
		p.cmd = nil
		return nil
	}
	_ = p.Signal(syscall.SIGTERM) // it may have just ended
	_, err := p.WaitEnd(cmp.Or(p.Grace, stopTime))
	if p.Grace > 0 {
		err = nil
	}
	p.Kill()
	return err
}

// WaitEnd waits until it has ended by itself, and gives its exit code.
func (p *Process) WaitEnd(limit time.Duration) (int, error) {
	select {
	case <-p.done:
		code := p.cmd.ProcessState.ExitCode()
		p.cmd = nil
		return code, nil
	case <-time.After(limit):
		return -1, fmt.Errorf("%s did not end within %v", p.Name, limit)
	}
}

// Restart stops it, as an upgrade does, and starts it again.
func (p *Process) Restart() error { return errors.Join(p.Stop(), p.Start()) }

// Log is all that it has logged.
func (p *Process) Log() string {
	raw, err := os.ReadFile(p.LogFile)
	if err != nil {
		return err.Error()
	}
	return string(raw)
}

// Tail is the end of a log.
func Tail(log string) string { return log[max(0, len(log)-logTail):] }
