package wire

import (
	"context"
	"errors"
	"net"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Serve serves the connections of a listener until Accept fails. codeOf returns the code of an
// error that has none; register registers the services.
func Serve(ctx context.Context, listener net.Listener, codeOf func(error) codes.Code, register func(*ttrpc.Server)) error {
	server, err := ttrpc.NewServer(ttrpc.WithUnaryServerInterceptor(
		func(ctx context.Context, decode ttrpc.Unmarshaler, _ *ttrpc.UnaryServerInfo, method ttrpc.Method) (any, error) {
			resp, err := method(ctx, decode)
			if _, is := status.FromError(err); !is {
				err = status.Error(codeOf(err), Text(err.Error()))
			}
			return resp, err
		}))
	if err != nil {
		return err
	}
	register(server)
	return errors.Join(server.Serve(ctx, listener), server.Close())
}
