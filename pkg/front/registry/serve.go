package registry

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-proxy/crust-proxy/internal/peercred"
	"github.com/crust-proxy/crust-proxy/pkg/front/passthrough"
)

// served is the CSI socket that stands in for a driver. It stays while the daemon
// runs, also when the registrar has gone: the driver may still answer, and one
// that comes back finds the socket as it was.
type served struct {
	name   string
	socket string
	server *grpc.Server
	ended  chan struct{}
	driver atomic.Pointer[connection]
}

// connection is the way to a driver at an endpoint.
type connection struct {
	endpoint string
	conn     *grpc.ClientConn
}

// reach gives a connection to a driver: the one in use, or a new one that is put
// to use when the driver has proved to be the right one.
func (r *Registry) reach(info *Driver) (*connection, error) {
	r.mu.Lock()
	front := r.served[info.Name]
	r.mu.Unlock()
	if front != nil {
		if link := front.driver.Load(); link.endpoint == info.Endpoint {
			return link, nil
		}
	}
	conn, err := dial(info.Endpoint)
	if err != nil {
		return nil, fmt.Errorf("driver %s: the endpoint %s cannot be dialled: %w", info.Name, info.Endpoint, err)
	}
	return &connection{endpoint: info.Endpoint, conn: conn}, nil
}

// drop closes a connection that was not put to use.
func (r *Registry) drop(name string, link *connection) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if front := r.served[name]; front == nil || front.driver.Load() != link {
		_ = link.conn.Close() // nothing is under way on it
	}
}

// serve gives the socket for a driver, made now or for an earlier session, and
// has it lead over the connection. Calls under way on another one end with that.
func (r *Registry) serve(name string, link *connection) (*served, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	front := r.served[name]
	if front != nil {
		if old := front.driver.Swap(link); old != link {
			_ = old.conn.Close()
		}
		return front, nil
	}
	front = &served{name: name, socket: socketPath(r.cfg.Sockets, name), ended: make(chan struct{})}
	front.driver.Store(link)
	if err := front.listen(r); err != nil {
		return nil, err
	}
	r.served[name] = front
	return front, nil
}

func (f *served) driverConn() *grpc.ClientConn { return f.driver.Load().conn }

func (f *served) listen(r *Registry) error {
	listener, err := peercred.Listen(f.socket, 0o600, "")
	if err != nil {
		return err
	}
	f.server = grpc.NewServer(r.cfg.Serve(f.name, func() (grpc.ClientConnInterface, error) { return f.driverConn(), nil })...)
	go func() {
		defer close(f.ended)
		if err := f.server.Serve(left{listener}); err != nil {
			r.cfg.Log.Error("a CSI socket is not served any more", zap.String("socket", f.socket), zap.Error(err))
		}
	}()
	return nil
}

// left is a listener whose socket file stays when it is closed.
type left struct{ *peercred.Listener }

// Close stops listening.
func (l left) Close() error { return l.UnixListener.Close() }

// rollBack is how long calls that were cut off may take to undo what they began.
const rollBack = 2 * time.Second

// stop lets the calls under way end, and cuts off those that do not. It does not
// wait for one that makes a filesystem: that goes on by itself, for as long as it
// takes, and what is left of the call is as after a kill.
func (f *served) stop(patience time.Duration) {
	drained := make(chan struct{})
	go func() { f.server.GracefulStop(); close(drained) }()
	select {
	case <-drained:
	case <-time.After(patience):
		f.server.Stop()
		select {
		case <-drained:
		case <-time.After(rollBack):
		}
	}
	<-f.ended
	_ = f.driverConn().Close()
}

// dial connects when the first call is made. A driver that was restarted is found
// again at once. The path is no part of an address, where it would be parsed.
func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///localhost", append(passthrough.DialOptions(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}),
		grpc.WithIdleTimeout(0), grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 2, Jitter: 0.2, MaxDelay: 500 * time.Millisecond},
			MinConnectTimeout: 5 * time.Second,
		}))...)
}
