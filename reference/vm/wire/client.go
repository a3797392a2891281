package wire

import (
	"context"
	"fmt"
	"net"
	"path"
	"strings"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// deadlines bound the calls; a caller's own deadline may be shorter. Methods that are not listed
// block until there is something to return.
var deadlines = map[string]time.Duration{
	"StartSandbox": 60 * time.Second, "Ping": 20 * time.Second, "Shutdown": 5 * time.Minute,
	"AddVolume": 5 * time.Minute, "RemoveVolume": 60 * time.Second,
	"GetVolumeStats": 20 * time.Second, "ResizeVolume": 90 * time.Second,
	"FreezeVolume": 60 * time.Second, "ThawVolume": 30 * time.Second,
	"CreateContainer": 60 * time.Second, "StartContainer": 60 * time.Second,
	"ExecProcess": 60 * time.Second, "SignalProcess": 20 * time.Second, "DeleteProcess": 60 * time.Second,
	"WriteInput": 20 * time.Second, "ResizeTerminal": 20 * time.Second,
}

// Client is the host's client of a guest. It checks every response.
type Client struct {
	SandboxService
	VolumesService
	ContainersService
	rpc  *ttrpc.Client
	done chan struct{}
}

// NewClient owns the connection from now on.
func NewClient(conn net.Conn) *Client {
	c := &Client{done: make(chan struct{})}
	c.rpc = ttrpc.NewClient(guard(conn), ttrpc.WithUnaryClientInterceptor(checkedCall), ttrpc.WithOnClose(func() { close(c.done) }))
	c.SandboxService, c.VolumesService, c.ContainersService = NewSandboxClient(c.rpc), NewVolumesClient(c.rpc), NewContainersClient(c.rpc)
	return c
}

// Close closes the connection, which ends all calls.
func (c *Client) Close() error { return c.rpc.Close() }

// Done is closed when the connection has ended, also because the guest broke the protocol.
func (c *Client) Done() <-chan struct{} { return c.done }

func checkedCall(ctx context.Context, req *ttrpc.Request, resp *ttrpc.Response, info *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
	method := path.Base(info.FullMethod)
	if limit, bounded := deadlines[method]; bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
		until, _ := ctx.Deadline()
		// The guest gives up earlier: it undoes what is late, and the error is its own.
		req.TimeoutNano = max(time.Until(until).Nanoseconds()*9/10, 1)
	}
	if err := invoke(ctx, req, resp); err != nil {
		return fmt.Errorf("ask the guest for %s: %w", method, err)
	}
	if code := resp.GetStatus().GetCode(); code != int32(codes.OK) {
		if code < 0 || code > int32(codes.Unauthenticated) {
			code = int32(codes.Unknown)
		}
		resp.Status, resp.Payload = &status.Status{Code: code, Message: "the guest: " + Text(resp.GetStatus().GetMessage())}, nil
		return nil
	}
	if check := checks[method]; check != nil {
		if err := check(req.GetPayload(), resp.GetPayload()); err != nil {
			return fmt.Errorf("%w: its response to %s: %w", ErrBroken, method, err)
		}
	}
	return nil
}

// Text makes untrusted text fit for a log and for the wire: one short line.
func Text(text string) string {
	text = strings.Map(func(r rune) rune {
		if !sys.IsText(string(r)) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, "?"))
	return sys.ClipTo(text, maxText-len("..."))
}
