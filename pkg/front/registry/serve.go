package registry

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/internal/peercred"
)

// maxSocketPath is the room of sun_path, without its final NUL.
const maxSocketPath = 107

// nameForm is CSI's rule for the name of a driver, which becomes a part of paths.
var nameForm = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)

// served is the CSI socket that stands in for a driver. It stays while the daemon
// runs: a driver that comes back finds it as it was.
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

// serve gives the socket for a driver, made now or for an earlier session.
func (r *Registry) serve(info *Driver) (*served, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	front := r.served[info.Name]
	if front == nil {
		front = &served{name: info.Name, socket: socketPath(r.cfg.Sockets, info.Name), ended: make(chan struct{})}
	}
	if err := front.connect(info.Endpoint); err != nil {
		return nil, err
	}
	if front.server != nil {
		return front, nil
	}
	if err := front.listen(r); err != nil {
		return nil, errors.Join(err, front.driver.Load().conn.Close())
	}
	r.served[info.Name] = front
	return front, nil
}

// socketPath is below the directory, by name where that fits.
func socketPath(dir, name string) string {
	if path := filepath.Join(dir, name+".sock"); len(path) <= maxSocketPath {
		return path
	}
	sum := sha256.Sum256([]byte(name))
	return filepath.Join(dir, hex.EncodeToString(sum[:8])+".sock")
}

// connect leads to another endpoint where the driver moved. Calls under way on
// the old one end with it.
func (f *served) connect(endpoint string) error {
	old := f.driver.Load()
	if old != nil && old.endpoint == endpoint {
		return nil
	}
	conn, err := dial(endpoint)
	if err != nil {
		return fmt.Errorf("driver %s: the endpoint %s cannot be dialled: %w", f.name, endpoint, err)
	}
	f.driver.Store(&connection{endpoint: endpoint, conn: conn})
	if old != nil {
		return old.conn.Close()
	}
	return nil
}

func (f *served) driverConn() grpc.ClientConnInterface { return f.driver.Load().conn }

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

// stop lets the calls under way end, and cuts off those that do not.
func (f *served) stop(patience time.Duration) {
	cut := time.AfterFunc(patience, f.server.Stop)
	defer cut.Stop()
	f.server.GracefulStop()
	<-f.ended
	_ = f.driver.Load().conn.Close() // nothing is under way any more
}
