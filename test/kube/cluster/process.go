//go:build system

package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

const (
	// startTime is how long a process may take until it serves.
	startTime = 60 * time.Second
	// stopTime is how long one may take to end when it is asked to.
	stopTime = 30 * time.Second
	// logTail is how much of a log is shown.
	logTail = 6000
)

// Process is one component. It may be stopped, killed and started again at any
// time; its log goes on in the same file.
type Process struct {
	Name string

	program string
	args    []string
	env     []string
	log     string
	// ready tells whether it serves; nil means that it does at once.
	ready func() error
	// grace is after how long Stop kills it, as kubelet does; 0 is an error after
	// stopTime instead.
	grace time.Duration

	cmd  *exec.Cmd
	done chan struct{}
}

// Launch starts it and waits for nothing.
func (p *Process) Launch() error {
	if p.Alive() {
		return fmt.Errorf("%s runs already", p.Name)
	}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(p.program, p.args...)
	cmd.Env = append(os.Environ(), p.env...)
	cmd.Dir = filepath.Dir(p.log)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	p.cmd, p.done = cmd, make(chan struct{})
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
	if p.ready == nil {
		return nil
	}
	for deadline := time.Now().Add(startTime); ; time.Sleep(20 * time.Millisecond) {
		err := p.ready()
		switch {
		case err == nil:
			return nil
		case !p.Alive():
			return fmt.Errorf("%s ended:\n%s", p.Name, p.Log())
		case time.Now().After(deadline):
			return fmt.Errorf("%s does not serve after %v: %w\n%s", p.Name, startTime, err, p.Log())
		}
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
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have just ended
	var slow error
	select {
	case <-p.done:
	case <-time.After(cmp.Or(p.grace, stopTime)):
		if p.grace == 0 {
			slow = fmt.Errorf("%s did not end within %v of SIGTERM", p.Name, stopTime)
		}
	}
	p.Kill()
	return slow
}

// Restart stops it, as an upgrade does, and starts it again.
func (p *Process) Restart() error { return errors.Join(p.Stop(), p.Start()) }

// Log is the end of what it has logged.
func (p *Process) Log() string {
	raw, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(raw[max(0, len(raw)-logTail):])
}
