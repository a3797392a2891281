//go:build system

package top

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	ossignal "os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// terminal is crustctl top on a pseudo terminal of its own, as a shell starts it.
type terminal struct {
	t      *testing.T
	cmd    *exec.Cmd
	master *os.File
	slave  *os.File // held open, so that its modes can be looked at afterwards
	before unix.Termios

	mu    sync.Mutex
	shown bytes.Buffer
	wide  bool
	read  sync.WaitGroup
	ended bool
}

func open(t *testing.T, n *node, env []string, args ...string) *terminal {
	t.Helper()
	master, slave, err := pty.Open()
	check.Must(t, err)
	check.Must(t, pty.Setsize(master, &pty.Winsize{Rows: 24, Cols: 100}))
	cmd := exec.Command(rig.Program(t, "crustctl"), append([]string{"--socket", n.AdminSocket, "top", "--interval", "1s"}, args...)...)
	cmd.Env = append([]string{"TERM=xterm-256color", "LANG=C.UTF-8", "PATH=" + os.Getenv("PATH")}, env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	s := &terminal{t: t, cmd: cmd, master: master, slave: slave}
	s.before = s.modes()
	check.Must(t, cmd.Start())
	s.read.Go(s.record)
	t.Cleanup(s.close)
	return s
}

func (s *terminal) record() {
	buffer := make([]byte, 64<<10)
	for {
		n, err := s.master.Read(buffer)
		s.mu.Lock()
		s.shown.Write(buffer[:n])
		s.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (s *terminal) close() {
	if !s.ended {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
	}
	_ = s.slave.Close()
	_ = s.master.Close()
	s.read.Wait()
}

func (s *terminal) modes() unix.Termios {
	s.t.Helper()
	modes, err := unix.IoctlGetTermios(int(s.slave.Fd()), unix.TCGETS)
	check.Must(s.t, err)
	return *modes
}

func (s *terminal) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.shown.String()
}

// redraw has the whole screen drawn anew, by a change of the terminal's size: else
// only what changed is.
func (s *terminal) redraw() {
	s.t.Helper()
	s.mu.Lock()
	s.shown.Reset()
	s.wide = !s.wide
	size := &pty.Winsize{Rows: 24, Cols: 120}
	if s.wide {
		size.Cols = 121
	}
	s.mu.Unlock()
	check.Must(s.t, pty.Setsize(s.master, size))
}

// sees waits until a screen has all the words.
func (s *terminal) sees(words ...string) {
	s.t.Helper()
	var text string
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); {
		s.redraw()
		for range 20 {
			time.Sleep(20 * time.Millisecond)
			if text = s.text(); hasAll(text, words) {
				return
			}
		}
	}
	s.t.Fatalf("never saw %q; the last screen was %q", words, text)
}

func hasAll(text string, words []string) bool {
	for _, word := range words {
		if !strings.Contains(text, word) {
			return false
		}
	}
	return true
}

func (s *terminal) press(keys string) {
	s.t.Helper()
	_, err := s.master.WriteString(keys)
	check.Must(s.t, err)
}

// ends waits for the end by itself, and tells the exit code, or the signal.
func (s *terminal) ends() (code int, signal syscall.Signal) {
	s.t.Helper()
	done := make(chan error, 1)
	go func() { done <- s.cmd.Wait() }()
	select {
	case err := <-done:
		s.ended = true
		if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
			s.t.Fatal(err)
		}
	case <-time.After(20 * time.Second):
		s.t.Fatal("crustctl top does not end")
	}
	status, ok := s.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if ok && status.Signaled() {
		return -1, status.Signal()
	}
	return s.cmd.ProcessState.ExitCode(), 0
}

// wantRestored fails where the shell would not find its terminal as it was.
func (s *terminal) wantRestored() {
	s.t.Helper()
	if s.modes() != s.before {
		s.t.Error("the terminal's modes are not as they were")
	}
	for _, sequence := range []string{"\x1b[?1049l", "\x1b[?25h"} { // the shell's screen, the cursor
		check.Eventually(s.t, "the terminal is told "+sequence, func() bool { return strings.Contains(s.text(), sequence) })
	}
}

func TestTopShowsTheNode(t *testing.T) {
	n := newNode(t)
	for _, name := range []string{"vol-a", "vol-b", "vol-c"} {
		n.publish(name, "noatime")
	}
	n.boot("vol-a", 93)
	shim := n.boot("vol-b", 41)
	s := open(t, n, nil)
	s.sees("vol-a", "93%", "vol-b", "41%", "vol-c", "PUBLISHED", "BOUND", "Handlers", "1/1", "live")

	n.boot("vol-c", 7)
	s.sees("7%", "3") // told by the watch, asked at once

	s.press("n\x1b[B\x1b[B\r") // by name, down to vol-c, open
	s.sees("sandbox-vol-c", "noatime", "images/vol-c", "disk.example.com", "Inodes", "read-write")
	s.press("\x1b")
	s.sees("USAGE", "vol-a")
	s.press("/vol-b\r")
	s.sees("1", "of", "3", "shown", "vol-b")
	if strings.Contains(s.text(), "vol-a") {
		t.Error("the filter shows all")
	}

	check.Must(t, shim.Kill())
	s.sees("PUBLISHED") // the sandbox died, and the watch says so
	s.press("\x1b")
	s.sees("vol-a")
	s.press("?")
	s.sees("keys", "pause")
	s.press("x")
	s.press("q")
	if code, signal := s.ends(); code != 0 || signal != 0 {
		t.Errorf("ended with %d, %v", code, signal)
	}
	s.wantRestored()
}

func TestTopWaitsForTheDaemon(t *testing.T) {
	n := newNode(t)
	n.publish("vol-a")
	n.boot("vol-a", 50)
	s := open(t, n, nil)
	s.sees("live", "50%")
	n.Kill()
	s.sees("AWAY", "50%", "again")
	n.publishAfterRestart("vol-b")
	s.sees("live", "vol-a", "vol-b")
	s.press("\x03")
	if code, _ := s.ends(); code != 0 {
		t.Errorf("ended with %d", code)
	}
	s.wantRestored()
}

func TestTopEndsBySignal(t *testing.T) {
	n := newNode(t)
	n.publish("vol-a")
	s := open(t, n, []string{"NO_COLOR=1"})
	s.sees("vol-a", "live")
	for _, colour := range []string{"\x1b[31m", "\x1b[32m", "\x1b[36m", ";32m"} {
		if strings.Contains(s.text(), colour) {
			t.Errorf("NO_COLOR is set, and it paints %q", colour)
		}
	}
	check.Must(t, s.cmd.Process.Signal(syscall.SIGTERM))
	if code, signal := s.ends(); code != 0 || signal != 0 {
		t.Errorf("ended with %d, %v", code, signal)
	}
	s.wantRestored()
}

// Who closes a terminal's window leaves nothing running behind it.
func TestTopEndsWithItsTerminal(t *testing.T) {
	n := newNode(t)
	n.publish("vol-a")
	s := open(t, n, nil)
	s.sees("vol-a", "live")
	check.Must(t, s.slave.Close())
	check.Must(t, s.master.Close())
	if code, signal := s.ends(); code != 0 && signal != syscall.SIGHUP {
		t.Errorf("ended with %d, %v", code, signal)
	}

	// The same for one that does not hear the hang-up, as below nohup.
	nohup := openIgnoring(t, n, syscall.SIGHUP)
	nohup.sees("vol-a", "live")
	check.Must(t, nohup.slave.Close())
	check.Must(t, nohup.master.Close())
	if code, signal := nohup.ends(); signal != 0 {
		t.Errorf("ended with %d, %v", code, signal)
	}
}

func TestTopIsTextInAPipe(t *testing.T) {
	n := newNode(t)
	n.publish("vol-a")
	n.boot("vol-a", 66)
	for format, parts := range map[string][]string{
		"table": {"vol-a", " 66%", "#####"}, "wide": {"vol-a", " 66%", "#####", "sandbox-vol-", "disk.example.com"},
	} {
		cmd := exec.Command(rig.Program(t, "crustctl"), "--socket", n.AdminSocket, "top", "-o", format)
		cmd.Env = []string{"LANG=C", "TERM=xterm"}
		out, err := cmd.CombinedOutput()
		if err != nil || !hasAll(string(out), parts) || bytes.ContainsRune(out, '\x1b') {
			t.Errorf("%v:\n%s", err, out)
		}
		for line := range strings.Lines(string(out)) {
			if format == "table" && len(line) > 81 {
				t.Errorf("it has a line of %d characters: %s", len(line), line)
			}
		}
	}
}

// openIgnoring starts crustctl where a signal is ignored from the start.
func openIgnoring(t *testing.T, n *node, signal os.Signal) *terminal {
	t.Helper()
	ossignal.Ignore(signal) // a child inherits it
	defer ossignal.Reset(signal)
	return open(t, n, nil)
}
