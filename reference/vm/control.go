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

// supervisor is what a command asks the supervisor of a sandbox.
type supervisor struct {
	wire.SupervisorService
	wire.ContainersService
	rpc *ttrpc.Client
}

const (
	dialTime = 5 * time.Second
	// callTime bounds a command that the supervisor runs, whose parts it bounds itself.
	callTime = 10 * time.Minute
)

// dial connects with the supervisor.
func (p place) dial() (*supervisor, error) {
	conn, err := net.DialTimeout("unix", p.control(), dialTime)
	if err != nil {
		return nil, fmt.Errorf("the sandbox does not answer: %w", err)
	}
	rpc := ttrpc.NewClient(conn)
	return &supervisor{wire.NewSupervisorClient(rpc), wire.NewContainersClient(rpc), rpc}, nil
}

// call asks the supervisor one thing.
func call[Q, A any](p place, method func(*supervisor, context.Context, *Q) (*A, error), question *Q) (*A, error) {
	s, err := p.dial()
	if err != nil {
		return nil, err
	}
	defer func() { _ = s.rpc.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	answer, err := method(s, ctx, question)
	return answer, plain(err)
}

// plain is an error of the supervisor in its own words.
func plain(err error) error {
	said, is := status.FromError(err)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ttrpc.ErrClosed):
		return fmt.Errorf("the sandbox has ended: %w", err)
	case is:
		return errors.New(said.Message())
	}
	return err
}

// control is the supervisor's end. What concerns the guest alone is the guest's to answer.
type control struct {
	wire.ContainersService
	sandbox *sandbox
}

func (s *sandbox) serveControl(ctx context.Context, listener net.Listener) error {
	c := &control{ContainersService: s.guest, sandbox: s}
	unknown := func(error) codes.Code { return codes.Unknown }
	return wire.Serve(ctx, listener, unknown, func(server *ttrpc.Server) {
		wire.RegisterSupervisorService(server, c)
		wire.RegisterContainersService(server, c)
	})
}

// AddContainer goes on to its end when who asked is killed: half of it would have to be
// taken back from a guest that is busy with it.
func (c *control) AddContainer(ctx context.Context, req *wire.AddContainerRequest) (*wire.AddContainerResponse, error) {
	warnings, err := c.sandbox.create(context.WithoutCancel(ctx), req.GetContainer(), req.GetBundle())
	return &wire.AddContainerResponse{Warnings: warnings}, err
}

func (c *control) EndSandbox(context.Context, *wire.EndSandboxRequest) (*wire.Empty, error) {
	c.sandbox.shutdown()
	return new(wire.Empty), nil
}

func (c *control) DeleteProcess(ctx context.Context, req *wire.DeleteProcessRequest) (*wire.Empty, error) {
	if req.GetProcess().GetExec() != "" {
		return c.ContainersService.DeleteProcess(ctx, req)
	}
	return new(wire.Empty), c.sandbox.delete(context.WithoutCancel(ctx), req.GetProcess().GetContainer())
}

// WaitProcess answers when the process has ended. When who waits is gone before, the process
// is ended: for the container runtime it has ended already.
func (c *control) WaitProcess(ctx context.Context, req *wire.WaitProcessRequest) (*wire.WaitProcessResponse, error) {
	ended, err := c.ContainersService.WaitProcess(ctx, req)
	switch {
	case ctx.Err() != nil:
		c.abandon(req.GetProcess())
	case req.GetProcess().GetExec() != "":
		// Who waits deletes it when its output has been read, unless that one is killed meanwhile.
		time.AfterFunc(abandonTime, func() { c.abandon(req.GetProcess()) })
	}
	return ended, err
}

// SignalProcess expects of a kill of a container what is to come of it.
func (c *control) SignalProcess(ctx context.Context, req *wire.SignalProcessRequest) (*wire.Empty, error) {
	answer, err := c.ContainersService.SignalProcess(ctx, req)
	if req.GetSignal() == uint32(unix.SIGKILL) && req.GetProcess().GetExec() == "" {
		go c.sandbox.mustEnd(req.GetProcess().GetContainer())
	}
	return answer, err
}

// abandonTime bounds how long the output of a process that has ended is kept.
const abandonTime = time.Minute

// abandon is for a process that nobody waits for any more.
func (c *control) abandon(p *wire.Process) {
	ctx := context.Background() // the guest's client bounds each call
	if p.GetExec() != "" {
		_, _ = c.ContainersService.DeleteProcess(ctx, &wire.DeleteProcessRequest{Process: p})
		return
	}
	_, _ = c.SignalProcess(ctx, &wire.SignalProcessRequest{Process: p, Signal: uint32(unix.SIGKILL), All: true})
}

// listen makes a socket for root.
func listen(path string) (net.Listener, error) {
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	return listener, os.Chmod(path, 0o600)
}
