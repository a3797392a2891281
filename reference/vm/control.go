package vm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// supervisor is a command's client of the supervisor of a sandbox.
type supervisor struct {
	wire.SupervisorService
	wire.ContainersService
	rpc *ttrpc.Client
}

const (
	dialTimeout = 5 * time.Second
	// callTimeout bounds a call to the supervisor, which bounds the parts of its work itself.
	callTimeout = 10 * time.Minute
)

func (d sandboxDir) dial() (*supervisor, error) {
	conn, err := net.DialTimeout("unix", d.controlSocket(), dialTimeout)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errUnanswered, err)
	}
	rpc := ttrpc.NewClient(conn)
	return &supervisor{wire.NewSupervisorClient(rpc), wire.NewContainersClient(rpc), rpc}, nil
}

// errUnanswered is the error of a call that has no response, neither of the supervisor nor of the guest.
var errUnanswered = errors.New("the sandbox does not answer")

func call[Q, A any](d sandboxDir, method func(*supervisor, context.Context, *Q) (*A, error), req *Q) (*A, error) {
	return callWithin(callTimeout, d, method, req)
}

func callWithin[Q, A any](timeout time.Duration, d sandboxDir, method func(*supervisor, context.Context, *Q) (*A, error), req *Q) (*A, error) {
	s, err := d.dial()
	if err != nil {
		return nil, err
	}
	defer func() { _ = s.rpc.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	reply, err := method(s, ctx, req)
	return reply, withoutStatus(err)
}

// withoutStatus keeps the supervisor's message of an error, without the words that gRPC adds.
func withoutStatus(err error) error {
	is, ok := status.FromError(err)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ttrpc.ErrClosed):
		return fmt.Errorf("%w: it has ended: %w", errUnanswered, err)
	case ok:
		return errors.New(is.Message())
	}
	return fmt.Errorf("%w: %w", errUnanswered, err)
}

// controlServer serves the commands. It passes calls that concern the guest alone on to the guest.
type controlServer struct {
	wire.ContainersService
	sandbox *sandbox
}

func (s *sandbox) serveControl(ctx context.Context, listener net.Listener) error {
	c := &controlServer{ContainersService: s.guest, sandbox: s}
	return wire.Serve(ctx, listener, func(error) codes.Code { return codes.Unknown }, func(server *ttrpc.Server) {
		wire.RegisterSupervisorService(server, c)
		wire.RegisterContainersService(server, c)
	})
}

// AddContainer continues when its caller is killed: a half-created container would have to be
// removed from a guest that is still creating it.
func (c *controlServer) AddContainer(ctx context.Context, req *wire.AddContainerRequest) (*wire.AddContainerResponse, error) {
	warnings, err := c.sandbox.createContainer(context.WithoutCancel(ctx), req.GetContainer(), req.GetBundle())
	return &wire.AddContainerResponse{Warnings: warnings}, err
}

func (c *controlServer) EndSandbox(context.Context, *wire.EndSandboxRequest) (*wire.Empty, error) {
	c.sandbox.requestStop()
	return new(wire.Empty), nil
}

func (c *controlServer) DeleteProcess(ctx context.Context, req *wire.DeleteProcessRequest) (*wire.Empty, error) {
	if req.GetProcess().GetExec() != "" {
		return c.ContainersService.DeleteProcess(ctx, req)
	}
	return new(wire.Empty), c.sandbox.deleteContainer(context.WithoutCancel(ctx), req.GetProcess().GetContainer())
}

// WaitProcess returns when the process has ended. If its caller (`crust-vm attach`) ends first,
// the process is killed: for the container runtime it has ended.
func (c *controlServer) WaitProcess(ctx context.Context, req *wire.WaitProcessRequest) (*wire.WaitProcessResponse, error) {
	if req.GetProcess().GetExec() != "" {
		waiting, cancel := context.WithCancel(ctx)
		defer cancel()
		go c.sandbox.enforceEnd(waiting, req.GetProcess().GetContainer())
	}
	reply, err := c.ContainersService.WaitProcess(ctx, req)
	switch {
	case ctx.Err() != nil:
		c.abandon(req.GetProcess())
	case req.GetProcess().GetExec() != "":
		// The caller deletes the process after it has read its output, unless it is killed.
		time.AfterFunc(outputRetention, func() { c.abandon(req.GetProcess()) })
	}
	return reply, err
}

// SignalProcess makes sure that a killed container ends.
func (c *controlServer) SignalProcess(ctx context.Context, req *wire.SignalProcessRequest) (*wire.Empty, error) {
	reply, err := c.ContainersService.SignalProcess(ctx, req)
	if req.GetSignal() == uint32(unix.SIGKILL) && req.GetProcess().GetExec() == "" {
		go c.sandbox.enforceKill(req.GetProcess().GetContainer())
	}
	return reply, err
}

// outputRetention is how long the output of an ended process is kept.
const outputRetention = time.Minute

// abandon ends a process that has no proxy any more.
func (c *controlServer) abandon(p *wire.Process) {
	ctx := context.Background() // wire.Client bounds each call
	if p.GetExec() != "" {
		_, _ = c.ContainersService.DeleteProcess(ctx, &wire.DeleteProcessRequest{Process: p})
		return
	}
	_, _ = c.SignalProcess(ctx, &wire.SignalProcessRequest{Process: p, Signal: uint32(unix.SIGKILL), All: true})
}

// listen creates a socket that only root can use.
func listen(path string) (net.Listener, error) {
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	return listener, os.Chmod(path, 0o600)
}
