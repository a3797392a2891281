package ctl

import (
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

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// maxMessage bounds an answer: a page of 1000 volumes with long errors fits.
const maxMessage = 64 << 20

// reconnect is how soon a daemon that was away is found again: `top` waits for it,
// and a socket on this machine costs nothing to try.
var reconnect = backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}

// mostConnect bounds one try to connect.
const mostConnect = 20 * time.Second

// client is a connection to the daemon that remembers why it could not be made.
type client struct {
	adminv1.AdminClient
	conn   *grpc.ClientConn
	socket string

	mu   sync.Mutex
	dial error
}

func newClient(socket string) (*client, error) {
	path, err := socketPath(socket)
	if err != nil {
		return nil, err
	}
	c := &client{socket: path}
	// passthrough: a path needs no resolving, and no proxy of the environment is asked.
	c.conn, err = grpc.NewClient("passthrough:///crust-proxy",
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the kernel tells the peers of a unix socket
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
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", c.socket)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dial = err
	return conn, err
}

// explain puts the error of a call into words.
func (c *client) explain(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return explain(err, c.socket, c.dial)
}

func (c *client) Close() error { return c.conn.Close() }

// list gathers all pages.
func (c *client) list(ctx context.Context, req *adminv1.ListVolumesRequest) ([]*adminv1.Volume, error) {
	var all []*adminv1.Volume
	for {
		page, err := c.ListVolumes(ctx, req)
		if err != nil {
			return nil, c.explain(err)
		}
		all = append(all, page.GetVolumes()...)
		next := page.GetNextPageToken()
		if next == "" {
			return all, nil
		}
		if next == req.GetPageToken() {
			return nil, errors.New("the daemon gave the same page twice")
		}
		req.PageToken = next
	}
}
