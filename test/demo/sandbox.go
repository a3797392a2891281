package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
)

// sandbox is the demo's hold on a running one.
type sandbox struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stdout *bufio.Reader
	loop   string
	ended  bool
}

// startSandbox starts a process that does what Kata's shim and guest do.
func (n *node) startSandbox(id, target string) *sandbox {
	cmd, err := again(roleSandbox, n.daemon.Dir, id, target)
	n.must(err)
	s := &sandbox{cmd: cmd}
	s.stdin, err = cmd.StdinPipe()
	n.must(err)
	stdout, err := cmd.StdoutPipe()
	n.must(err)
	cmd.Stderr = os.Stderr
	s.stdout = bufio.NewReader(stdout)
	n.must(cmd.Start())
	n.t.Cleanup(func() {
		if err := s.end(); err != nil {
			n.t.Error(err)
		}
	})
	s.loop, err = s.answer()
	n.must(err)
	return s
}

// do gives the sandbox a command and reads its one line of answer.
func (s *sandbox) do(command string) (string, error) {
	if err := s.send(command); err != nil {
		return "", err
	}
	return s.answer()
}

// send gives it a command whose answer is read later.
func (s *sandbox) send(command string) error {
	_, err := fmt.Fprintln(s.stdin, command)
	return err
}

func (s *sandbox) answer() (string, error) {
	line, err := s.stdout.ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("the sandbox ended: %w", err)
	}
	status, text, _ := strings.Cut(strings.TrimSpace(line), " ")
	if status != "ok" {
		return "", errors.New(text)
	}
	return text, nil
}

// stop ends the sandbox as kubelet does.
func (s *sandbox) stop() error {
	_, err := s.do("stop")
	s.loop = ""
	return errors.Join(err, s.end())
}

// end is for the end, whatever happened: a sandbox that nobody talks to stops by
// itself, and one that does not is killed.
func (s *sandbox) end() error {
	if s.ended {
		return nil
	}
	s.ended = true
	_ = s.stdin.Close()
	timer := time.AfterFunc(5*time.Second, func() { _ = s.cmd.Process.Kill() })
	err := s.cmd.Wait() // it has said itself what went wrong
	timer.Stop()
	if err == nil || s.loop == "" {
		return nil
	}
	return loopdev.Detach(s.loop)
}
