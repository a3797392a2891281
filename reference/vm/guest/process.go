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
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// process is a process of a container, which begins as this program. It is told by its
// control socket what to become.
type process struct {
	cmd     *exec.Cmd
	control *os.File
	// stdin, stdout and stderr are our ends of its pipes. A terminal is its stdin and its
	// stdout.
	stdin, stdout, stderr *os.File
	terminal              bool
	theirs                []*os.File // the other ends, until it has started

	done chan struct{} // closed when it has ended; code is valid then
	code uint32
}

// controlFD is the socket in the process.
const controlFD = 3

// newProcess makes the pipes of a process.
func newProcess(terminal bool) (*process, error) {
	p := &process{cmd: exec.Command(self, wordWorkload), terminal: terminal, done: make(chan struct{})}
	p.cmd.Env, p.cmd.Dir = []string{}, "/"
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	p.control = os.NewFile(uintptr(pair[0]), "control")
	p.cmd.ExtraFiles = []*os.File{os.NewFile(uintptr(pair[1]), "control")}
	p.theirs = p.cmd.ExtraFiles
	if terminal {
		return p, nil // it is opened in the container
	}
	theirs, err := p.pipes()
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = theirs[0], theirs[1], theirs[2]
	p.theirs = append(p.theirs, theirs[:]...)
	if err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func (p *process) pipes() (theirs [3]*os.File, err error) {
	var in, out, errs error
	theirs[0], p.stdin, in = os.Pipe()
	p.stdout, theirs[1], out = os.Pipe()
	p.stderr, theirs[2], errs = os.Pipe()
	return theirs, errors.Join(in, out, errs)
}

// start starts it and waits for its end.
func (p *process) start(attr *syscall.SysProcAttr) error {
	p.cmd.SysProcAttr = attr
	err := p.cmd.Start()
	for _, file := range p.theirs {
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

// exitCode is that of a shell.
func exitCode(status syscall.WaitStatus) uint32 {
	if status.Signaled() {
		return 128 + uint32(status.Signal()) //nolint:gosec // signals are small
	}
	return uint32(status.ExitStatus()) & 0xff //nolint:gosec // just cut
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// execute lets the process become the workload. Its first process knows the terminals of
// the container.
func (p *process) execute(ctx context.Context, first int) error {
	terminal := -1
	if p.terminal {
		var err error
		if terminal, err = p.openTerminal(first); err != nil {
			return fmt.Errorf("open a terminal in the container: %w", err)
		}
	}
	// The socket closes with the execution.
	_, err := p.ask(ctx, terminal)
	return err
}

// ask says something and waits for the reply. None means that the process has become the
// workload, or has ended.
func (p *process) ask(ctx context.Context, what any) (said reply, err error) {
	defer interruptible(ctx, p.control)()
	if err = json.NewEncoder(p.control).Encode(what); err == nil {
		err = json.NewDecoder(p.control).Decode(&said)
	}
	switch {
	case errors.Is(err, io.EOF):
		return reply{}, nil
	case err != nil:
		return reply{}, fmt.Errorf("the process does not say how it goes: %w", err)
	case said.NotKnown:
		return said, fmt.Errorf("%s: %w", said.Error, errNotKnown)
	case said.Error != "":
		return said, errors.New(said.Error)
	}
	return said, nil
}

// interruptible ends reads and writes of a file with ctx.
func interruptible(ctx context.Context, file *os.File) (stop func()) {
	_ = file.SetDeadline(time.Time{})
	cancel := context.AfterFunc(ctx, func() { _ = file.SetDeadline(time.Now()) })
	return func() { cancel() }
}

// openTerminal opens a terminal of the container and gives its number there.
func (p *process) openTerminal(first int) (int, error) {
	root, err := sys.OpenDir("/proc/" + strconv.Itoa(first) + "/root")
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
	return number, nil
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
	for _, file := range append(p.theirs, p.control, p.stdin, p.stdout, p.stderr) {
		_ = file.Close() // also where there is none
	}
}

// read reads output. None means that it has ended.
func (p *process) read(ctx context.Context, req *wire.ReadOutputRequest) ([]byte, error) {
	file := p.stdout
	if req.GetStream() == wire.Stream_STREAM_STDERR {
		file = p.stderr
	}
	if file == nil || req.GetMax() == 0 || req.GetMax() > wire.MaxData {
		return nil, fmt.Errorf("the stream or the size: %w", errInvalid)
	}
	defer interruptible(ctx, file)()
	data := make([]byte, req.GetMax())
	n, err := file.Read(data)
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, unix.EIO) && p.terminal: // nobody has the terminal any more
		err = nil
	case errors.Is(err, os.ErrClosed):
		err = fmt.Errorf("process: %w", errUnknown)
	}
	return data[:n], err
}

// inputTime is how long input waits for a process that does not read.
const inputTime = time.Second

// write gives the process input. None is the end of it.
func (p *process) write(ctx context.Context, data []byte) (int, error) {
	if len(data) == 0 {
		return 0, p.closeInput()
	}
	if p.stdin == nil {
		return 0, fmt.Errorf("the input is closed: %w", errState)
	}
	ctx, cancel := context.WithTimeout(ctx, inputTime)
	defer cancel()
	defer interruptible(ctx, p.stdin)()
	n, err := p.stdin.Write(data)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = nil
	case errors.Is(err, os.ErrClosed), errors.Is(err, unix.EPIPE), errors.Is(err, unix.EIO):
		err = fmt.Errorf("the input is closed: %w", errState)
	}
	return n, err
}

// closeInput has nothing to do for a terminal, whose end is a character.
func (p *process) closeInput() error {
	if p.terminal || p.stdin == nil {
		return nil
	}
	if err := p.stdin.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

func (p *process) resize(columns, rows uint32) error {
	if !p.terminal || p.stdout == nil {
		return fmt.Errorf("the process has no terminal: %w", errState)
	}
	size := &unix.Winsize{Col: uint16(min(columns, 0xffff)), Row: uint16(min(rows, 0xffff))}
	return sys.OnFD(p.stdout, func(fd int) error { return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, size) })
}
