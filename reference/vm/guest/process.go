package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// process is a process of a container. It starts as this program, which gets its setup from the
// control socket and then executes the workload.
type process struct {
	cmd     *exec.Cmd
	control *os.File
	// stdin, stdout and stderr are the agent's ends of its pipes. A terminal is stdin and stdout;
	// it is there once opened is closed.
	stdin, stdout, stderr *os.File
	opened                chan struct{}
	terminal              bool
	childEnds             []*os.File // the other ends, until it has started

	reads atomic.Int64 // of its output

	done chan struct{} // closed when it has ended; then code is valid
	code uint32
}

// controlFD is the process's end of the control socket.
const controlFD = 3

// newProcess creates a process's pipes.
func newProcess(terminal bool) (*process, error) {
	p := &process{cmd: exec.Command(self, roleWorkload), terminal: terminal, opened: make(chan struct{}), done: make(chan struct{})}
	p.cmd.Env, p.cmd.Dir = []string{}, "/"
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	p.control = os.NewFile(uintptr(pair[0]), "control")
	p.cmd.ExtraFiles = []*os.File{os.NewFile(uintptr(pair[1]), "control")}
	p.childEnds = p.cmd.ExtraFiles
	if terminal {
		return p, nil // it is opened in the container
	}
	close(p.opened)
	ends, err := p.pipes()
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = ends[0], ends[1], ends[2]
	p.childEnds = append(p.childEnds, ends[:]...)
	if err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func (p *process) pipes() (childEnds [3]*os.File, err error) {
	var in, out, errs error
	childEnds[0], p.stdin, in = os.Pipe()
	p.stdout, childEnds[1], out = os.Pipe()
	p.stderr, childEnds[2], errs = os.Pipe()
	return childEnds, errors.Join(in, out, errs)
}

// start starts the process and, in the background, waits for its end.
func (p *process) start(attr *syscall.SysProcAttr) error {
	p.cmd.SysProcAttr = attr
	err := p.cmd.Start()
	for _, file := range p.childEnds {
		_ = file.Close()
	}
	if err != nil {
		close(p.done)
		return fmt.Errorf("start a process: %w", err)
	}
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait()
		status, _ := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
		p.code = exitCode(status)
	}()
	return nil
}

// exitCode is the exit code as a shell reports it.
func exitCode(status syscall.WaitStatus) uint32 {
	if status.Signaled() {
		return 128 + uint32(status.Signal()) //nolint:gosec // signals are small
	}
	return uint32(status.ExitStatus()) & 0xff //nolint:gosec // just cut
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) ended() bool { return sys.IsClosed(p.done) }

// execute makes the process execute the workload. own is the container's own process, whose
// root directory has the container's terminals.
func (p *process) execute(ctx context.Context, own int) (err error) {
	terminal := -1
	if p.terminal {
		if terminal, err = p.openTerminal(own); err != nil {
			return fmt.Errorf("open a terminal in the container: %w", err)
		}
	}
	// The execution closes the process's end of the socket.
	_, err = p.send(ctx, terminal)
	return err
}

// send sends a message and waits for the reply. It is empty if the process has executed the workload, or has ended.
func (p *process) send(ctx context.Context, message any) (r reply, err error) {
	defer interruptible(ctx, p.control.SetDeadline)()
	if err = json.NewEncoder(p.control).Encode(message); err == nil {
		err = json.NewDecoder(p.control).Decode(&r)
	}
	switch {
	case errors.Is(err, io.EOF):
		return reply{}, nil
	case err != nil:
		return reply{}, fmt.Errorf("the process does not answer: %w", err)
	case r.Unsupported:
		return r, fmt.Errorf("%s: %w", r.Error, errUnsupported)
	case r.Error != "":
		return r, errors.New(r.Error)
	}
	return r, nil
}

// interruptible makes reads or writes of a file, whose deadline it sets, fail when ctx is done.
func interruptible(ctx context.Context, setDeadline func(time.Time) error) (stop func()) {
	_ = setDeadline(time.Time{})
	cancel := context.AfterFunc(ctx, func() { _ = setDeadline(time.Now()) })
	return func() { cancel() }
}

// openTerminal opens a new terminal in the container and returns its number there.
func (p *process) openTerminal(own int) (int, error) {
	root, err := sys.OpenDir("/proc/" + strconv.Itoa(own) + "/root")
	if err != nil {
		return 0, err
	}
	defer sys.CloseFD(root)
	fd, err := sys.OpenBeneath(root, "dev/pts/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK, unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return 0, err
	}
	master := os.NewFile(uintptr(fd), "terminal")
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		return 0, errors.Join(err, master.Close())
	}
	p.stdin, p.stdout = master, master
	close(p.opened)
	return number, nil
}

// waitOpened waits until there are streams: the host attaches to a terminal before it starts the
// process. It fails if the process has ended without.
func (p *process) waitOpened(ctx context.Context) error {
	select {
	case <-p.opened:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-p.done:
	}
	if !sys.IsClosed(p.opened) {
		return fmt.Errorf("the terminal was never opened: %w", errState)
	}
	return nil
}

func (p *process) signal(signal syscall.Signal) error {
	err := p.cmd.Process.Signal(signal)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

func (p *process) wait(ctx context.Context) (uint32, error) {
	select {
	case <-p.done:
		return p.code, nil
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// end kills the process, waits for it and closes its pipes.
func (p *process) end(ctx context.Context) {
	if p.cmd.Process != nil {
		_ = p.signal(unix.SIGKILL)
		_, _ = p.wait(ctx)
	}
	p.close()
}

func (p *process) close() {
	for _, file := range append(p.childEnds, p.control, p.stdin, p.stdout, p.stderr) {
		_ = file.Close() // a nil file returns an error
	}
}

// gatherTime is how long more output is waited for. The host's calls are numbered with 31 bits for the life of the sandbox:
// a process that has written a lot, in small pieces, costs two calls a second at most.
func (p *process) gatherTime() time.Duration {
	if p.reads.Add(1) <= 100_000 {
		return 10 * time.Millisecond
	}
	return 500 * time.Millisecond
}

// read reads output. It returns no data at its end.
func (p *process) read(ctx context.Context, req *wire.ReadOutputRequest) ([]byte, error) {
	if err := p.waitOpened(ctx); err != nil {
		return nil, err
	}
	file := p.stdout
	if req.GetStream() == wire.Stream_STREAM_STDERR {
		file = p.stderr
	}
	if file == nil && p.terminal {
		return nil, nil // a terminal has one output
	}
	if file == nil || req.GetMax() == 0 || req.GetMax() > wire.MaxData {
		return nil, fmt.Errorf("the stream or the size: %w", errInvalid)
	}
	defer interruptible(ctx, file.SetReadDeadline)()
	data := make([]byte, req.GetMax())
	n, err := file.Read(data)
	if n > 0 {
		_ = file.SetReadDeadline(time.Now().Add(p.gatherTime()))
		more, _ := io.ReadFull(file, data[n:]) // the next call has its error
		n += more
	}
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, unix.EIO) && p.terminal: // no process has the terminal open any more
		err = nil
	case errors.Is(err, os.ErrClosed):
		err = fmt.Errorf("process: %w", errNotFound)
	}
	return data[:n], err
}

// inputTimeout bounds the wait for a process that does not read its input, or has not started.
const inputTimeout = time.Second

// write writes input; no data closes it.
func (p *process) write(ctx context.Context, data []byte) (int, error) {
	if len(data) == 0 {
		return 0, p.closeInput()
	}
	ctx, cancel := context.WithTimeout(ctx, inputTimeout)
	defer cancel()
	n, err := 0, p.waitOpened(ctx)
	if err == nil {
		defer interruptible(ctx, p.stdin.SetWriteDeadline)()
		n, err = p.stdin.Write(data)
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		err = nil
	case errors.Is(err, os.ErrClosed), errors.Is(err, unix.EPIPE), errors.Is(err, unix.EIO):
		err = fmt.Errorf("the input is closed: %w", errState)
	}
	return n, err
}

// closeInput does nothing for a terminal: there, a character ends the input.
func (p *process) closeInput() error {
	if p.terminal {
		return nil
	}
	if err := p.stdin.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

func (p *process) resize(ctx context.Context, columns, rows uint32) error {
	if err := p.waitOpened(ctx); err != nil || !p.terminal {
		return errors.Join(err, fmt.Errorf("the process has no terminal: %w", errState))
	}
	size := &unix.Winsize{Col: uint16(min(columns, 0xffff)), Row: uint16(min(rows, 0xffff))}
	return sys.OnFD(p.stdout, func(fd int) error { return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, size) })
}
