package vm

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/creack/pty"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"golang.org/x/term"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// attach is the proxy of a process in the guest: it carries its streams and signals, and exits with its exit code.
func (c *command) attach() (code int, err error) {
	if len(c.in.Words) != 3 {
		return 1, errors.New("attach: its arguments are a sandbox, a container and a process")
	}
	r, err := c.cfg.findRecord(c.in.Words[1])
	if err != nil {
		return killedCode, err
	}
	return c.proxy(r, c.in.Words[2]).run()
}

// proxy is the process on the host that represents a process in the guest: the container's own
// process, or one of an exec.
type proxy struct {
	dir        sandboxDir
	process    *wire.Process
	group      string
	supervisor *supervisor
	progress   chan struct{} // gets a value when output was written
}

func (c *command) proxy(r *record, exec string) *proxy {
	return &proxy{dir: c.cfg.sandbox(r.Sandbox), process: &wire.Process{Container: r.ID, Exec: exec}, group: r.Group, progress: make(chan struct{}, 1)}
}

// killedCode is the exit code of a killed process, and of one whose machine is gone.
const killedCode = 128 + int(unix.SIGKILL)

func (p *proxy) run() (code int, err error) {
	if p.supervisor, err = p.dir.dial(); err != nil {
		return killedCode, err
	}
	defer func() { _ = p.supervisor.rpc.Close() }()
	ctx := context.Background() // everything ends with this process
	waiting, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go p.forwardSignals(ctx)
	go p.copyInput(ctx)
	var outputs sync.WaitGroup
	for stream, to := range map[wire.Stream]*os.File{wire.Stream_STREAM_STDOUT: os.Stdout, wire.Stream_STREAM_STDERR: os.Stderr} {
		outputs.Go(func() {
			if err := p.copyOutput(ctx, stream, to); err != nil {
				time.AfterFunc(drainTimeout, func() { cancel(err) }) // unless the process has ended
			}
		})
	}
	reply, err := p.supervisor.WaitProcess(waiting, &wire.WaitProcessRequest{Process: p.process})
	if err != nil {
		return killedCode, withoutStatus(cmp.Or(context.Cause(waiting), err))
	}
	drained := make(chan struct{})
	go func() { outputs.Wait(); close(drained) }()
	p.waitDrained(drained)
	code = int(reply.GetExitCode())
	if p.process.GetExec() != "" {
		_, _ = p.supervisor.DeleteProcess(ctx, &wire.DeleteProcessRequest{Process: p.process})
	} else if code == killedCode && reply.GetOomKilled() {
		dieOutOfMemory(p.group)
	}
	return code, nil
}

// drainTimeout bounds the wait for more output of a process that has ended: a child of it may keep the streams open, and
// write now and then. The supervisor keeps an exec's output for outputRetention, which bounds the wait as a whole.
const drainTimeout = 5 * time.Second

func (p *proxy) waitDrained(drained <-chan struct{}) {
	total := time.After(outputRetention)
	for {
		select {
		case <-p.progress:
			continue
		case <-drained:
		case <-total:
		case <-time.After(drainTimeout):
		}
		return
	}
}

// copyOutput returns at the end of the output, or with an error.
func (p *proxy) copyOutput(ctx context.Context, stream wire.Stream, to io.WriteCloser) error {
	for {
		reply, err := p.supervisor.ReadOutput(ctx, &wire.ReadOutputRequest{Process: p.process, Stream: stream, Max: wire.MaxData})
		if stream == wire.Stream_STREAM_STDERR && status.Code(err) == codes.InvalidArgument {
			return nil // an earlier version's guest says so of a terminal, which has one output
		}
		if err != nil {
			return err
		}
		if len(reply.GetData()) == 0 {
			_ = to.Close()
			return nil
		}
		for piece := range slices.Chunk(reply.GetData(), 4<<10) { // which a slow reader reads in time
			if _, err := to.Write(piece); err != nil {
				return err
			}
			sys.Wake(p.progress)
		}
	}
}

// copyInput copies the standard input to the process, and closes it at its end.
func (p *proxy) copyInput(ctx context.Context) {
	buf := make([]byte, 32<<10)
	for {
		n, err := os.Stdin.Read(buf)
		for data := buf[:n]; len(data) > 0; {
			reply, err := p.supervisor.WriteInput(ctx, &wire.WriteInputRequest{Process: p.process, Data: data})
			if err != nil {
				return
			}
			data = data[reply.GetWritten():]
		}
		if err != nil {
			break
		}
	}
	_, _ = p.supervisor.WriteInput(ctx, &wire.WriteInputRequest{Process: p.process})
}

// forwardSignals passes signals on to the process, and the size of the terminal.
func (p *proxy) forwardSignals(ctx context.Context) {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH)
	stdin := int(os.Stdin.Fd())
	// The terminal in the guest does the line editing.
	if _, err := term.MakeRaw(stdin); err == nil {
		signals <- unix.SIGWINCH
	}
	for sig := range signals {
		number, _ := sig.(syscall.Signal) // as all are
		columns, rows, err := term.GetSize(stdin)
		switch {
		case number != unix.SIGWINCH || err != nil:
			_, _ = p.supervisor.SignalProcess(ctx, &wire.SignalProcessRequest{Process: p.process, Signal: uint32(number)}) //nolint:gosec // a signal
		case columns > 0 && rows > 0:
			_, _ = p.supervisor.ResizeTerminal(ctx, &wire.ResizeTerminalRequest{Process: p.process, Columns: uint32(columns), Rows: uint32(rows)}) //nolint:gosec // 16 bits
		}
	}
}

// exec runs another process in a container.
func (c *command) exec() (code int, err error) {
	if len(c.in.Words) == 0 {
		return 1, errors.New("exec: arguments are missing")
	}
	r, err := c.cfg.findRecord(c.in.Words[0])
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
	dir, id := c.cfg.sandbox(r.Sandbox), "x"+strconv.Itoa(os.Getpid())+"-"+strconv.FormatInt(time.Now().UnixNano(), 36)
	req := &wire.ExecProcessRequest{Process: &wire.Process{Container: r.ID, Exec: id}, Spec: raw}
	if _, err := call(dir, (*supervisor).ExecProcess, req); err != nil {
		return 1, err
	}
	if !c.in.Has("detach", "d") {
		return c.proxy(r, id).run()
	}
	pid, err := c.startProxy(r, process.Terminal, id)
	if err != nil {
		_, undoErr := call(dir, (*supervisor).DeleteProcess, &wire.DeleteProcessRequest{Process: req.GetProcess()})
		return 1, errors.Join(err, undoErr)
	}
	return 0, c.writePID(pid)
}

// process returns the process to run: the one of --process, or the container's own with the
// arguments of the command line.
func (c *command) process(r *record) (*specs.Process, error) {
	if file := c.in.Option("process", "p"); file != "" {
		return readJSON[specs.Process](file)
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

// sendTerminal creates a terminal, sends its master to the socket and returns its slave.
func sendTerminal(socket string) (slave *os.File, err error) {
	if socket == "" {
		return nil, errors.New("--console-socket is missing")
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
		return nil, errors.Join(fmt.Errorf("send it to %s: %w", socket, err), slave.Close())
	}
	return slave, nil
}
