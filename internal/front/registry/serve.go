package registry

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-proxy/crust-proxy/internal/front/passthrough"
	"github.com/crust-proxy/crust-proxy/internal/ground/peercred"
	"github.com/crust-proxy/crust-proxy/internal/ground/run"
	"github.com/crust-proxy/crust-proxy/internal/ground/step"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// served is the CSI socket that stands in for a driver. It stays while the daemon runs, also when the registrar has
// gone: the driver may still answer, and is served there again when its registrar comes back.
type served struct {
	name     string
	socket   string
	made     socketID // of the file that listener has
	listener *net.UnixListener
	server   *grpc.Server
	ended    chan struct{} // closed when no connection is accepted on listener any more
	calls    atomic.Int32  // under way
	driver   atomic.Pointer[connection]
}

// connection leads to the driver at an endpoint.
type connection struct {
	endpoint string
	conn     *grpc.ClientConn
	reached  atomic.Pointer[socketID] // by the last dial
}

// isReplaced reports whether another socket has come in place of the one that a connection leads to. The process behind
// that one may hang, and keeps the connection then.
func (e *endpoints) isReplaced(c *connection) bool {
	now, err := e.idBehind(c.endpoint)
	reached := c.reached.Load()
	return err == nil && reached != nil && now != (socketID{}) && now != *reached
}

// maxServed bounds the drivers that have a socket, and so the descriptors. A node has a handful of drivers.
const maxServed = 64

// makeRoom makes room for the socket of one more driver. If there are too many, it closes one
// whose registrar has gone and which has no deferred volume here. The caller holds the lock.
func (r *Registry) makeRoom(name string) error {
	if len(r.served) < maxServed {
		return nil
	}
	for _, idle := range slices.Sorted(maps.Keys(r.served)) {
		if r.names[idle] != nil || len(r.cfg.Front.Deferred(idle)) > 0 {
			continue
		}
		one := r.served[idle]
		delete(r.served, idle)
		_ = os.Remove(one.socket) // it is made again when the driver comes back
		r.parts.Go(func() { one.stop(r.cfg.Patience) })
		return nil
	}
	return refusef("driver %s: crust-proxy stands in for %d drivers already, which is the limit: remove registrars that are not used from %s",
		name, maxServed, r.cfg.Registry)
}

// mostNames bounds the drivers of one container or service, so that it cannot take the places of
// all others. It is recognized by its control group, because a container cannot create another one.
const mostNames = 16

// hasMany reports whether one container or service has as many names as it may. The caller holds the lock.
func (r *Registry) hasMany(from string) bool {
	count := 0
	for _, one := range r.names {
		if from != "" && one.from == from {
			count++
		}
	}
	return count >= mostNames
}

// controlGroup returns the control group of the process that made a socket, or "" if it is not
// known, as in a container without the node's process namespace.
func controlGroup(ctx context.Context, socket string) string {
	conn, err := sys.DialUnix(ctx, socket)
	if err != nil {
		return ""
	}
	defer func() { _ = conn.Close() }()
	who, err := sys.Peer(conn)
	if err != nil || who.Pid <= 0 {
		return ""
	}
	group, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", who.Pid))
	return string(group)
}

// reach returns a connection to a driver: the one in use, or a new one. The caller hands it
// to serve once the driver has proved to be the right one, else to drop.
func (r *Registry) reach(info *Driver) (*connection, error) {
	r.mu.Lock()
	front := r.served[info.Name]
	r.mu.Unlock()
	if front != nil {
		if link := front.driver.Load(); link.endpoint == info.Endpoint && !r.endpoints.isReplaced(link) {
			return link, nil
		}
	}
	link := &connection{endpoint: info.Endpoint}
	conn, err := dial(info.Endpoint, func(ctx context.Context, socket string) (net.Conn, error) {
		id, err := r.endpoints.idBehind(socket)
		if err != nil {
			return nil, err // to connect to it would hang too
		}
		link.reached.Store(&id)
		return dialOther(ctx, socket, r.cfg.Self)
	})
	if err != nil {
		return nil, fmt.Errorf("driver %s: the endpoint %s cannot be dialled: %w", info.Name, info.Endpoint, err)
	}
	link.conn = conn
	return link, nil
}

func (r *Registry) drop(name string, link *connection) {
	r.mu.Lock()
	front := r.served[name]
	inUse := front != nil && front.driver.Load() == link
	r.mu.Unlock()
	if !inUse {
		_ = link.conn.Close() // nothing is under way on it
	}
}

// serve returns the socket of a driver, made now or for an earlier session, and switches it
// to the connection. That ends the calls under way on the former connection.
func (r *Registry) serve(info *Driver, link *connection) (*served, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	front := r.served[info.Name]
	if front != nil {
		if old := front.driver.Swap(link); old != link {
			r.parts.Go(func() { _ = old.conn.Close() }) // it waits for a driver that reads no more
		}
		return front, nil
	}
	if err := r.makeRoom(info.Name); err != nil {
		return nil, err
	}
	front = &served{name: info.Name, socket: socketPath(r.cfg.Sockets, info.Name)}
	front.driver.Store(link)
	options := append(r.cfg.Front.ServerOptions(info.Name, info.reply, front), grpc.ChainStreamInterceptor(front.count))
	front.server = grpc.NewServer(options...)
	if err := front.listen(r.cfg.Log); err != nil {
		front.server.Stop() // it has goroutines from the beginning
		return nil, err
	}
	r.served[info.Name] = front
	return front, nil
}

// listen makes the socket, and serves it until the listener is closed or fails. The caller holds the lock.
func (f *served) listen(log *zap.Logger) error {
	if err := os.MkdirAll(filepath.Dir(f.socket), 0o700); err != nil {
		return err
	}
	listener, err := listen(f.socket)
	if errors.Is(err, unix.ENOSPC) { // the socket of before may have the last inode, and nobody serves it
		_ = os.Remove(f.socket)
		listener, err = listen(f.socket)
	}
	if err != nil {
		return err
	}
	ended := make(chan struct{})
	f.listener, f.made, f.ended = listener, idAt(f.socket), ended
	go func() {
		defer close(ended)
		if err := f.server.Serve(listener); err != nil && !errors.Is(err, net.ErrClosed) {
			log.Error("a CSI socket is not served any more", zap.String("socket", f.socket), zap.Error(err))
		}
	}()
	return nil
}

// repair makes the socket anew if somebody removed it, or no connection can be accepted on it any more. The
// caller holds the lock.
func (f *served) repair(cfg *Config) {
	if id := idAt(f.socket); !sys.IsClosed(f.ended) && id == f.made && id != (socketID{}) {
		return
	}
	_ = f.listener.Close()
	<-f.ended
	err := f.listen(cfg.Log)
	cfg.Log.Warn("a CSI socket had gone, and is made anew", zap.String("socket", f.socket), zap.Error(err))
}

// count sees all calls: of a passthrough.Proxy each is a stream to gRPC.
func (f *served) count(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	f.calls.Add(1)
	defer f.calls.Add(-1)
	return handler(srv, stream)
}

func (r *Registry) busy() bool {
	return slices.ContainsFunc(slices.Collect(maps.Values(r.served)), func(one *served) bool { return one.calls.Load() > 0 })
}

// Invoke calls the driver over the present connection, which can change with an upgrade.
func (f *served) Invoke(ctx context.Context, method string, args, reply any, options ...grpc.CallOption) error {
	ctx, end := step.Begin(ctx, "driver"+method)
	defer end()
	return f.driver.Load().conn.Invoke(ctx, method, args, reply, options...)
}

// NewStream begins a stream to the driver over the present connection.
func (f *served) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, options ...grpc.CallOption) (grpc.ClientStream, error) {
	return f.driver.Load().conn.NewStream(ctx, desc, method, options...)
}

// listen makes a socket for root only. It appears at its path when it is listening already:
// kubelet connects at once and does not retry, and it ignores the temporary name under which
// the socket is made. One of before is replaced then: the lock of the run directory and the kubelet root
// says that no other daemon serves it. The file stays when the listener is closed.
func listen(path string) (*net.UnixListener, error) {
	made, err := peercred.Replace(path)
	if err != nil {
		return nil, err
	}
	return made.UnixListener, nil
}

// stop waits for the calls under way, and ends those that take longer than patience.
func (f *served) stop(patience time.Duration) {
	run.Drain(f.server, patience, func() {})
	<-f.ended
	_ = f.driver.Load().conn.Close()
}

// dialOther connects to a socket unless this process serves it. A registrar's endpoint can be
// a link to a socket of ours: each call would then call itself until memory is exhausted.
func dialOther(ctx context.Context, socket string, self int) (net.Conn, error) {
	conn, err := sys.DialUnix(ctx, socket)
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

// dial returns a connection that connects at the first call. Short retries find a restarted
// driver soon. The path is not part of the target, where gRPC would parse it.
func dial(socket string, by func(ctx context.Context, socket string) (net.Conn, error)) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///localhost", append(passthrough.DialOptions(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return by(ctx, socket) }),
		grpc.WithIdleTimeout(0), grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 2, Jitter: 0.2, MaxDelay: 500 * time.Millisecond},
			MinConnectTimeout: 5 * time.Second,
		}))...)
}
