package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
		return lostCode, errors.New("attach: its arguments are a sandbox, a container and a process")
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
	place              place
	container, process string
	group              string
}

func (c *command) proxy(r *record, process string) proxy {
	return proxy{place: c.cfg.sandbox(r.Sandbox), container: r.ID, process: process, group: r.Group}
}

func (p proxy) request(do string) request {
	return request{Do: do, Container: p.container, Exec: p.process}
}

// lostCode is how a process ends whose machine is gone: as one that was killed.
const lostCode = 128 + int(unix.SIGKILL)

func (p proxy) run() (code int, err error) {
	waits, err := p.place.dial(p.request(doWait))
	if err != nil {
		return lostCode, err
	}
	defer func() { _ = waits.Close() }()
	go p.forward()
	go p.copyInput()
	var outputs sync.WaitGroup
	for stream, to := range map[wire.Stream]*os.File{wire.Stream_STREAM_STDOUT: os.Stdout, wire.Stream_STREAM_STDERR: os.Stderr} {
		outputs.Go(func() { p.copyOutput(stream, to) })
	}
	ended, err := readAnswer(waits)
	if err != nil {
		return lostCode, err
	}
	// A process that this one left behind may keep the streams open.
	said := make(chan struct{})
	go func() { outputs.Wait(); close(said) }()
	select {
	case <-said:
	case <-time.After(drainTime):
	}
	if ended.OutOfMemory {
		runOutOfMemory(p.group)
	}
	return int(ended.ExitCode), nil
}

// drainTime is how long the rest of the output is waited for.
const drainTime = 5 * time.Second

func (p proxy) copyOutput(stream wire.Stream, to *os.File) {
	r := p.request(doOutput)
	r.Stream = int32(stream)
	conn, err := p.place.dial(r)
	if err != nil {
		return
	}
	defer func() { _ = conn.Close() }()
	if _, err := io.Copy(to, conn); err == nil {
		_ = to.Close()
	}
}

func (p proxy) copyInput() {
	conn, err := p.place.dial(p.request(doInput))
	if err != nil {
		return
	}
	defer func() { _ = conn.Close() }()
	_, _ = io.Copy(conn, os.Stdin)
	_ = conn.CloseWrite()
	// The other end closes when the process has all of it.
	_, _ = io.Copy(io.Discard, conn)
}

// forward hands on what can be handed on: signals, and the size of a terminal.
func (p proxy) forward() {
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
		r := p.request(doSignal)
		r.Signal = uint32(number) //nolint:gosec // a signal
		if columns, rows, err := term.GetSize(stdin); number == unix.SIGWINCH && err == nil {
			if columns == 0 || rows == 0 {
				continue
			}
			r = p.request(doTerminal)
			r.Columns, r.Rows = uint32(columns), uint32(rows) //nolint:gosec // 16 bits
		}
		_, _ = p.place.call(r)
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
	if _, err := place.call(request{Do: doExec, Container: r.ID, Exec: id, Process: raw}); err != nil {
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
