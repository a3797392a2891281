package wire

import (
	"context"
	"errors"
	"net"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Agent is the guest's end.
type Agent struct {
	Sandbox    SandboxService
	Volumes    VolumesService
	Containers ContainersService
	// CodeOf gives the code of an error.
	CodeOf func(error) codes.Code
}

// Serve answers on the connections of a listener, until that has no more.
func (a Agent) Serve(ctx context.Context, listener net.Listener) error {
	server, err := ttrpc.NewServer(ttrpc.WithUnaryServerInterceptor(
		func(ctx context.Context, decode ttrpc.Unmarshaler, _ *ttrpc.UnaryServerInfo, method ttrpc.Method) (any, error) {
			answer, err := method(ctx, decode)
			if err != nil {
				err = status.Error(a.CodeOf(err), Text(err.Error()))
			}
			return answer, err
		}))
	if err != nil {
		return err
	}
	RegisterSandboxService(server, a.Sandbox)
	RegisterVolumesService(server, a.Volumes)
	RegisterContainersService(server, a.Containers)
	return errors.Join(server.Serve(ctx, listener), server.Close())
}
