package qemu

import (
	"cmp"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// child is a process that the kernel kills when this process ends.
type child struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error // after done
}

func startChild(cmd *exec.Cmd) (*child, error) {
	stderr := new(Tail)
	cmd.Stderr, cmd.Dir, cmd.Env = stderr, "/", []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.SysProcAttr = cmp.Or(cmd.SysProcAttr, new(syscall.SysProcAttr))
	cmd.SysProcAttr.Pdeathsig, cmd.WaitDelay = syscall.SIGKILL, killTimeout
	c := &child{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The kernel kills the child when the thread that started it ends, so keep the thread.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		// No child ends by itself without a failure.
		_ = cmd.Wait()
		c.err = errors.New(strings.TrimRight(fmt.Sprintf("%v: %v", cmd.ProcessState, stderr), ": \n"))
		close(c.done)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return c, nil
}

// hasEnded reports whether it has ended. A nil child was never started.
func (c *child) hasEnded() bool { return c != nil && sys.IsClosed(c.done) }

// killTimeout bounds the wait for virtiofsd, which hangs when a filesystem that it serves does.
const killTimeout = 10 * time.Second

// kill kills it and waits. A nil child was never started.
func (c *child) kill(timeout time.Duration) {
	if c != nil {
		_ = c.cmd.Process.Kill()
		select {
		case <-c.done:
		case <-time.After(timeout):
		}
	}
}

// tailSize bounds what is kept of an endless output.
const tailSize = 16 << 10

// Tail keeps the end of what is written to it.
type Tail struct {
	mu  sync.Mutex
	all []byte
}

// Write never fails.
func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all = append(t.all, p...)
	if over := len(t.all) - tailSize; over > 0 {
		t.all = append(t.all[:0], t.all[over:]...)
	}
	return len(p), nil
}

// String returns the kept output as printable text.
func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Map(func(r rune) rune {
		if r == '\n' || r >= ' ' && r < 0x7f {
			return r
		}
		return -1
	}, string(t.all))
}
