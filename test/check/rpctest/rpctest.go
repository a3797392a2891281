// Package rpctest has the gRPC servers and connections of unit tests.
package rpctest

import (
	"errors"
	"net"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// T is what the helpers need of a test.
type T interface {
	Helper()
	Cleanup(end func())
	Errorf(format string, args ...any)
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// Serve serves at a socket until stop is called or the test ends.
func Serve(t T, socket string, server *grpc.Server) (stop func()) {
	t.Helper()
	return ServeOn(t, check.Value(net.Listen("unix", socket))(t), server)
}

// ServeOn is Serve for a listener of the test.
func ServeOn(t T, listener net.Listener, server *grpc.Server) (stop func()) {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	stop = sync.OnceFunc(func() {
		server.Stop()
		err := <-ended
		check.That(t, err == nil || errors.Is(err, grpc.ErrServerStopped), "%v: %v", listener.Addr(), err)
	})
	t.Cleanup(stop)
	return stop
}

// Dial connects to a socket for the time of the test.
func Dial(t T, socket string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	conn := check.Value(grpc.NewClient("unix:"+socket, append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...))(t)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}
