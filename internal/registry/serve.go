package registry

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-proxy/crust-proxy/internal/passthrough"
	"github.com/crust-proxy/crust-proxy/internal/peercred"
	"github.com/crust-proxy/crust-proxy/internal/run"
	"github.com/crust-proxy/crust-proxy/internal/sys"
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

// maxServed bounds the drivers that have a socket, and with it descriptors. Nodes
// have a handful.
const maxServed = 64

// makeRoom sees that one more driver can have a socket. Where there are too many, one
// goes whose registrar has gone and of which no deferred volume lives here. The caller
// holds the lock.
func (r *Registry) makeRoom(name string) error {
	if len(r.served) < maxServed {
		return nil
	}
	for _, idle := range slices.Sorted(maps.Keys(r.served)) {
		if r.names[idle] != nil || len(r.cfg.Deferred(idle)) > 0 {
			continue
		}
		one := r.served[idle]
		delete(r.served, idle)
		_ = os.Remove(one.socket) // a driver that comes back makes it anew
		r.parts.Go(func() { one.stop(r.cfg.Patience()) })
		return nil
	}
	return refusef("driver %s: crust-proxy stands in for %d drivers already, which is its bound: remove registrars that are not used from %s",
		name, maxServed, r.cfg.Registry)
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
	conn, err := dial(info.Endpoint, r.cfg.Self)
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
	if err := r.makeRoom(name); err != nil {
		return nil, err
	}
	front = &served{name: name, socket: socketPath(r.cfg.Sockets, name), ended: make(chan struct{})}
	front.driver.Store(link)
	listener, err := listen(front.socket)
	if err != nil {
		return nil, err
	}
	front.server = grpc.NewServer(r.cfg.Serve(name, front)...)
	go func() {
		defer close(front.ended)
		if err := front.server.Serve(listener); err != nil {
			r.cfg.Log.Error("a CSI socket is not served any more", zap.String("socket", front.socket), zap.Error(err))
		}
	}()
	r.served[name] = front
	return front, nil
}

func (f *served) driverConn() *grpc.ClientConn { return f.driver.Load().conn }

// Invoke calls the driver over the connection of now, which is another one after an upgrade.
func (f *served) Invoke(ctx context.Context, method string, args, reply any, options ...grpc.CallOption) error {
	return f.driverConn().Invoke(ctx, method, args, reply, options...)
}

// NewStream begins a stream to the driver in the same way.
func (f *served) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, options ...grpc.CallOption) (grpc.ClientStream, error) {
	return f.driverConn().NewStream(ctx, desc, method, options...)
}

// listen has a socket appear at a path that is closed to others and has somebody listening:
// kubelet tries once. It overlooks the name under which the socket is made. The socket's
// file stays when the listener is closed.
func listen(path string) (*net.UnixListener, error) {
	made, err := peercred.Listen(path, 0o600, "")
	if err != nil {
		return nil, err
	}
	return made.UnixListener, nil
}

// stop lets the calls under way end, and cuts off those that do not.
func (f *served) stop(patience time.Duration) {
	run.Drain(f.server, patience, func() {})
	<-f.ended
	_ = f.driverConn().Close()
}

// dialOther connects to a socket unless this very process serves it. A registrar's
// endpoint can be a link to a socket of ours: each call would then call itself until
// memory ends.
func dialOther(ctx context.Context, socket string, self int) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil || self == 0 {
		return conn, err
	}
	who, err := sys.Peer(conn)
	if err == nil && int(who.Pid) == self {
		err = fmt.Errorf("%s leads back to crust-proxy itself: let the registrar's --kubelet-registration-path be the driver's own socket", socket)
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// dial connects when the first call is made. A driver that was restarted is found
// again at once. The path is no part of an address, where it would be parsed. A
// process with the pid self is not connected to; 0 is none.
func dial(socket string, self int) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///localhost", append(passthrough.DialOptions(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return dialOther(ctx, socket, self) }),
		grpc.WithIdleTimeout(0), grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 2, Jitter: 0.2, MaxDelay: 500 * time.Millisecond},
			MinConnectTimeout: 5 * time.Second,
		}))...)
}
