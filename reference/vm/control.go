package vm

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

// request is what a command asks the supervisor: one a connection, a line of JSON. The
// answer is a line, too; that to doOutput and the request of doInput are followed by the
// bytes of the stream.
type request struct {
	Do        string `json:"do"`
	Container string `json:"container,omitempty"`
	Exec      string `json:"exec,omitempty"`
	// Bundle is that of a new container, Process that of a new exec.
	Bundle  string          `json:"bundle,omitempty"`
	Process json.RawMessage `json:"process,omitempty"`
	Signal  uint32          `json:"signal,omitempty"`
	All     bool            `json:"all,omitempty"`
	Stream  int32           `json:"stream,omitempty"`
	Columns uint32          `json:"columns,omitempty"`
	Rows    uint32          `json:"rows,omitempty"`
	// Target is a volume's, with what is asked of it.
	Target  string        `json:"target,omitempty"`
	Least   int64         `json:"least,omitempty"`
	Most    int64         `json:"most,omitempty"`
	Timeout time.Duration `json:"timeout,omitempty"`
}

// What can be asked.
const (
	doCreate   = "create"
	doStart    = "start"
	doExec     = "exec"
	doSignal   = "signal"
	doDelete   = "delete"
	doWait     = "wait"
	doOutput   = "output"
	doInput    = "input"
	doTerminal = "terminal"
	doShutdown = "shutdown"
)

type answer struct {
	Error    string   `json:"error,omitempty"`
	Kind     int      `json:"kind,omitempty"` // the exit status for the error
	Warnings []string `json:"warnings,omitempty"`
	ExitCode uint32   `json:"exitCode,omitempty"`
	// OutOfMemory is a container that the guest's kernel killed.
	OutOfMemory bool            `json:"outOfMemory,omitempty"`
	Stats       *abi.StatsReply `json:"stats,omitempty"`
	Size        int64           `json:"size,omitempty"`
}

// ofSupervisor is an error that the supervisor told.
type ofSupervisor struct {
	text string
	kind error
}

func (e *ofSupervisor) Error() string { return e.text }
func (e *ofSupervisor) Unwrap() error { return e.kind }

func (a answer) err() error {
	if a.Error == "" {
		return nil
	}
	kinds := map[int]error{
		abi.ExitUsage: handler.ErrUsage, abi.ExitNoSandbox: handler.ErrNoSandbox, abi.ExitUnsupported: fsops.ErrUnsupported,
		abi.ExitOutOfRange: fsops.ErrOutOfRange, abi.ExitWrongState: fsops.ErrFrozen,
	}
	return &ofSupervisor{text: a.Error, kind: kinds[a.Kind]}
}

const (
	// maxRequest bounds a request: the largest has a process' arguments in it.
	maxRequest = 2 << 20
	dialTime   = 5 * time.Second
	// callTime bounds a command that the supervisor runs, whose parts it bounds itself.
	callTime = 5 * time.Minute
)

// dial sends a request; its answer, and what follows, is read from the connection.
func (p place) dial(r request) (*net.UnixConn, error) {
	conn, err := net.DialTimeout("unix", p.control(), dialTime)
	if err != nil {
		return nil, fmt.Errorf("the sandbox does not answer: %w", err)
	}
	raw, err := json.Marshal(r)
	if err == nil {
		_, err = conn.Write(append(raw, '\n'))
	}
	local, is := conn.(*net.UnixConn)
	if err != nil || !is {
		return nil, errors.Join(err, conn.Close())
	}
	return local, nil
}

// call asks the supervisor.
func (p place) call(r request) (answer, error) {
	conn, err := p.dial(r)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetReadDeadline(time.Now().Add(callTime)); err != nil {
		return answer{}, err
	}
	return readAnswer(conn)
}

func readAnswer(conn net.Conn) (a answer, err error) {
	if err := json.NewDecoder(conn).Decode(&a); err != nil {
		return a, fmt.Errorf("the sandbox has ended: %w", err)
	}
	return a, a.err()
}

// serveControl answers requests until the socket is closed.
func (s *sandbox) serveControl(ctx context.Context, listener net.Listener) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = conn.Close() }()
			s.serve(ctx, conn)
		}()
	}
}

func (s *sandbox) serve(ctx context.Context, conn net.Conn) {
	in := bufio.NewReaderSize(conn, maxRequest)
	line, err := in.ReadSlice('\n')
	var r request
	if err == nil {
		err = json.Unmarshal(line, &r)
	}
	if err != nil {
		_ = json.NewEncoder(conn).Encode(answer{Error: err.Error(), Kind: abi.ExitUsage})
		return
	}
	switch r.Do {
	case doOutput:
		s.output(ctx, r, conn)
	case doInput:
		s.input(ctx, r, in)
	case doWait:
		s.wait(ctx, r, conn, in)
	default:
		a, err := s.do(ctx, r)
		if err != nil {
			a = answer{Error: err.Error(), Kind: handler.ExitStatus(err)}
		}
		_ = json.NewEncoder(conn).Encode(a)
	}
}

// listen makes a socket for root.
func listen(path string) (net.Listener, error) {
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	return listener, os.Chmod(path, 0o600)
}
