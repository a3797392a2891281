package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/doctor"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// maxMessage bounds an answer: a page of 5000 volumes with long errors fits.
const maxMessage = 64 << 20

// reconnect is how soon a daemon that was away is found again: `top` waits for it,
// and a socket on this machine costs nothing to try.
var reconnect = backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}

const mostConnect = 20 * time.Second

// client is a connection to the daemon; it keeps the last error of connecting.
type client struct {
	adminv1.AdminClient
	conn   *grpc.ClientConn
	daemon *daemon
	socket string
	unit   unit

	mu   sync.Mutex
	dial error
}

const forEver = 100 * 365 * 24 * time.Hour

// The APIs, as the configuration calls them.
const (
	apiAdmin   = "admin"
	apiRuntime = "runtime"
)

// daemon is where the daemon is, and how long to wait for it.
type daemon struct {
	env     Env
	socket  string
	timeout time.Duration
	api     string // apiAdmin or apiRuntime
}

func (d *daemon) service() doctor.Service { return d.env.Node.Service }

// check refuses wrong flags, and makes a --timeout of 0 the longest one.
func (d *daemon) check() error {
	if d.timeout < 0 {
		return fmt.Errorf("--timeout %s is negative", d.timeout)
	}
	d.timeout = cmp.Or(d.timeout, forEver)
	_, err := socketPath(d.socket)
	return err
}

func (d daemon) within(timeout time.Duration) *daemon {
	d.timeout = timeout
	return &d
}

// call connects, calls f within the timeout, and explains its error.
func (d *daemon) call(ctx context.Context, f func(context.Context, *client) error) error {
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()
	c, err := d.connect()
	if err != nil {
		return err
	}
	ctx, end := context.WithCancelCause(ctx)
	var watch sync.WaitGroup
	watch.Go(func() { c.unit.watch(ctx, c.conn, end) })
	err = f(ctx, c)
	if err != nil && errors.Is(context.Cause(ctx), errUnitDown) {
		err = c.notRunning("nobody answers on " + c.socket)
	}
	err = c.explain(err)
	end(nil)
	watch.Wait()
	return errors.Join(err, c.conn.Close())
}

type adminMethod[Req, Resp any] func(adminv1.AdminClient, context.Context, Req, ...grpc.CallOption) (Resp, error)

func ask[Req, Resp any](ctx context.Context, d *daemon, method adminMethod[Req, Resp], req Req) (Resp, error) {
	var got Resp
	err := d.call(ctx, func(ctx context.Context, c *client) (err error) {
		got, err = method(c, ctx, req)
		return err
	})
	return got, err
}

// run makes one call and prints its answer: encoded for a program, or by people.
func run[Req any, Resp proto.Message](cmd *cobra.Command, d *daemon, out *printer.Printer, method adminMethod[Req, Resp], req Req, people func(Resp) error) error {
	got, err := ask(cmd.Context(), d, method, req)
	if err != nil {
		return err
	}
	return out.Result(got, func() error { return people(got) })
}

func (d *daemon) connect() (*client, error) {
	path, err := socketPath(d.socket)
	if err != nil {
		return nil, err
	}
	c := &client{socket: path, daemon: d, unit: unitOf(d.env, path)}
	// passthrough: a path needs no resolving, and no proxy of the environment is asked.
	c.conn, err = grpc.NewClient("passthrough:///crust-proxy",
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the kernel identifies the peers of a unix socket
		grpc.WithContextDialer(c.connect), grpc.WithNoProxy(), grpc.WithAuthority("localhost"),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: mostConnect, Backoff: reconnect}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)))
	if err != nil {
		return nil, fmt.Errorf("make a client for %s: %w", path, err)
	}
	c.AdminClient = adminv1.NewAdminClient(c.conn)
	return c, nil
}

func socketPath(socket string) (string, error) {
	path := strings.TrimPrefix(strings.TrimPrefix(socket, "unix:"), "//")
	switch {
	case path == "":
		return "", errors.New("--socket needs the path of the admin socket")
	case path[0] == '@' || path[0] == 0:
		return "", errors.New("--socket: crust-proxy has no abstract sockets; give a path")
	}
	return path, nil
}

func (c *client) connect(ctx context.Context, _ string) (net.Conn, error) {
	conn, err := sys.DialUnix(ctx, c.socket)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dial = err
	return conn, err
}
