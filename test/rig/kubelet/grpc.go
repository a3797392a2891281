package kubelet

import (
	"context"
	"errors"
	"net"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///localhost", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}))
}

// process is a gRPC server at a socket that stands for a container's process.
type process struct {
	server *grpc.Server
	socket string
	ended  chan struct{}
}

// begin serves at the socket; a stale one is replaced.
func begin(socket string, services func(*grpc.Server)) (*process, error) {
	if err := removeSocket(socket); err != nil {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, err
	}
	listener.SetUnlinkOnClose(false)
	p := &process{server: grpc.NewServer(), socket: socket, ended: make(chan struct{})}
	services(p.server)
	go func() {
		defer close(p.ended)
		_ = p.server.Serve(listener) // ends with kill
	}()
	return p, nil
}

// kill leaves the socket behind.
func (p *process) kill() {
	p.server.Stop()
	<-p.ended
}

// stop takes the socket away.
func (p *process) stop() error {
	p.kill()
	return removeSocket(p.socket)
}

func removeSocket(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
