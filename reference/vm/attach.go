package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/creack/pty"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// attach stands for a process in the guest: it carries its streams and its signals, and
// ends as it ends.
func (c *command) attach() (code int, err error) {
	if len(c.in.Words) != 3 {
		return 1, errors.New("attach: its arguments are a sandbox, a container and a process")
	}
	r, err := c.cfg.find(c.in.Words[1])
	if err != nil {
		return lostCode, err
	}
	return c.proxy(r, c.in.Words[2]).run()
}

// proxy is a process of the host for one in the guest: the container's own, or one that
// was exec'ed into it.
type proxy struct {
	place   place
	process *wire.Process
	group   string
	to      *supervisor
}

func (c *command) proxy(r *record, exec string) *proxy {
	return &proxy{place: c.cfg.sandbox(r.Sandbox), process: &wire.Process{Container: r.ID, Exec: exec}, group: r.Group}
}

// lostCode is how a process ends whose machine is gone: as one that was killed.
const lostCode = 128 + int(unix.SIGKILL)

func (p *proxy) run() (code int, err error) {
	if p.to, err = p.place.dial(); err != nil {
		return lostCode, err
	}
	defer func() { _ = p.to.rpc.Close() }()
	ctx := context.Background() // all of it ends with us
	go p.forward(ctx)
	go p.copyInput(ctx)
	var outputs sync.WaitGroup
	for stream, to := range map[wire.Stream]*os.File{wire.Stream_STREAM_STDOUT: os.Stdout, wire.Stream_STREAM_STDERR: os.Stderr} {
		outputs.Go(func() { p.copyOutput(ctx, stream, to) })
	}
	ended, err := p.to.WaitProcess(ctx, &wire.WaitProcessRequest{Process: p.process})
	if err != nil {
		return lostCode, plain(err)
	}
	// A process that this one left behind may keep the streams open.
	said := make(chan struct{})
	go func() { outputs.Wait(); close(said) }()
	select {
	case <-said:
	case <-time.After(drainTime):
	}
	code = int(ended.GetExitCode())
	if p.process.GetExec() != "" {
		_, _ = p.to.DeleteProcess(ctx, &wire.DeleteProcessRequest{Process: p.process})
	} else if code == lostCode && ended.GetOomKilled() {
		runOutOfMemory(p.group)
	}
	return code, nil
}

// drainTime is how long the rest of the output is waited for.
const drainTime = 5 * time.Second

func (p *proxy) copyOutput(ctx context.Context, stream wire.Stream, to *os.File) {
	for {
		said, err := p.to.ReadOutput(ctx, &wire.ReadOutputRequest{Process: p.process, Stream: stream, Max: wire.MaxData})
		if err == nil && len(said.GetData()) > 0 {
			_, err = to.Write(said.GetData())
		} else if err == nil {
			_ = to.Close()
			return
		}
		if err != nil {
			return
		}
	}
}

// copyInput gives the process what comes, and then the end.
func (p *proxy) copyInput(ctx context.Context) {
	buf := make([]byte, 32<<10)
	for {
		n, err := os.Stdin.Read(buf)
		for data := buf[:n]; len(data) > 0; {
			taken, err := p.to.WriteInput(ctx, &wire.WriteInputRequest{Process: p.process, Data: data})
			if err != nil {
				return
			}
			data = data[taken.GetWritten():]
		}
		if err != nil {
			break
		}
	}
	_, _ = p.to.WriteInput(ctx, &wire.WriteInputRequest{Process: p.process})
}

// forward hands on what can be handed on: signals, and the size of a terminal.
func (p *proxy) forward(ctx context.Context) {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH)
	stdin := int(os.Stdin.Fd())
	// Everything is left to the terminal in the guest.
	if _, err := term.MakeRaw(stdin); err == nil {
		signals <- unix.SIGWINCH
	}
	for got := range signals {
		number, is := got.(syscall.Signal)
		if !is {
			continue
		}
		columns, rows, err := term.GetSize(stdin)
		switch {
		case number != unix.SIGWINCH || err != nil:
			_, _ = p.to.SignalProcess(ctx, &wire.SignalProcessRequest{Process: p.process, Signal: uint32(number)}) //nolint:gosec // a signal
		case columns > 0 && rows > 0:
			_, _ = p.to.ResizeTerminal(ctx, &wire.ResizeTerminalRequest{Process: p.process, Columns: uint32(columns), Rows: uint32(rows)}) //nolint:gosec // 16 bits
		}
	}
}

// exec runs a further process in a container.
func (c *command) exec() (code int, err error) {
	if len(c.in.Words) == 0 {
		return 1, errors.New("exec: arguments are missing")
	}
	r, err := c.cfg.find(c.in.Words[0])
	if err != nil {
		return 1, err
	}
	process, err := c.process(r)
	if err != nil {
		return 1, err
	}
	raw, err := json.Marshal(process)
	if err != nil {
		return 1, err
	}
	place, id := c.cfg.sandbox(r.Sandbox), "x"+strconv.Itoa(os.Getpid())+"-"+strconv.FormatInt(time.Now().UnixNano(), 36)
	req := &wire.ExecProcessRequest{Process: &wire.Process{Container: r.ID, Exec: id}, Spec: raw}
	if _, err := call(place, (*supervisor).ExecProcess, req); err != nil {
		return 1, err
	}
	if !c.in.Has("detach", "d") {
		return c.proxy(r, id).run()
	}
	pid, err := c.startProxy(r, process.Terminal, id)
	if err != nil {
		return 1, err
	}
	return 0, c.writePID(pid)
}

// process is what is to run: as a file says, or as the container's own but for the words.
func (c *command) process(r *record) (*specs.Process, error) {
	if file := c.in.Option("process", "p"); file != "" {
		raw, err := os.ReadFile(file) //nolint:gosec // the caller's
		if err != nil {
			return nil, err
		}
		process := new(specs.Process)
		return process, json.Unmarshal(raw, process)
	}
	spec, err := readSpec(r.Bundle)
	if err != nil {
		return nil, err
	}
	process := *spec.Process
	process.Args, process.Terminal = c.in.Words[1:], false
	if len(process.Args) == 0 {
		return nil, errors.New("exec: nothing to run")
	}
	return &process, nil
}

// sendTerminal makes a terminal, sends its one end to the socket and gives the other.
func sendTerminal(socket string) (slave *os.File, err error) {
	if socket == "" {
		return nil, errors.New("nobody wants its other end: --console-socket is missing")
	}
	master, slave, err := pty.Open()
	if err != nil {
		return nil, err
	}
	defer func() { _ = master.Close() }()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err == nil {
		_, _, err = conn.WriteMsgUnix([]byte(slave.Name()), unix.UnixRights(int(master.Fd())), nil)
		err = errors.Join(err, conn.Close())
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("send it: %w", err), slave.Close())
	}
	return slave, nil
}
