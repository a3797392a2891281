package wire

import (
	"context"
	"errors"
	"net"
	"sync"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Serve answers on a connection until it is over: the guest's end. Errors get the code
// that codeOf has for them.
func Serve(ctx context.Context, conn net.Conn, agent AgentService, codeOf func(error) codes.Code) error {
	server, err := ttrpc.NewServer(ttrpc.WithUnaryServerInterceptor(
		func(ctx context.Context, decode ttrpc.Unmarshaler, _ *ttrpc.UnaryServerInfo, method ttrpc.Method) (any, error) {
			answer, err := method(ctx, decode)
			if err != nil {
				err = status.Error(codeOf(err), Text(err.Error()))
			}
			return answer, err
		}))
	if err != nil {
		return err
	}
	RegisterAgentService(server, agent)
	one := &single{watched: watched{Conn: conn, over: make(chan struct{})}}
	stop := context.AfterFunc(ctx, func() { _ = one.watched.Close() })
	defer stop()
	err = server.Serve(ctx, one)
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	return errors.Join(err, server.Close())
}

// single is a listener with one connection.
type single struct {
	watched watched
	given   bool
}

func (s *single) Accept() (net.Conn, error) {
	if s.given {
		<-s.watched.over
		return nil, net.ErrClosed
	}
	s.given = true
	return &s.watched, nil
}

func (s *single) Close() error   { return nil }
func (s *single) Addr() net.Addr { return s.watched.LocalAddr() }

// watched is a connection whose end is seen.
type watched struct {
	net.Conn
	once sync.Once
	over chan struct{}
}

func (w *watched) Close() error {
	w.once.Do(func() { close(w.over) })
	return w.Conn.Close()
}
