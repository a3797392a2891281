package driver

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/crust-proxy/crust-proxy/internal/peercred"
	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// registrar registers the driver with kubelet, in place of a sidecar.
type registrar struct{ driver *Driver }

// againAfter is the wait after a refusal. kubelet tries a socket once: it has to
// appear anew.
const againAfter = time.Second

// Run serves the registration socket until ctx ends.
func (r *registrar) Run(ctx context.Context) error {
	for {
		err := r.once(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !errors.Is(err, errRefused):
			return err
		case !sys.Sleep(ctx, againAfter):
			return nil
		}
	}
}

var errRefused = errors.New("kubelet refused the driver")

// once serves until ctx ends or kubelet refuses.
func (r *registrar) once(ctx context.Context) error {
	listener, err := peercred.Listen(r.driver.config.RegistrationSocket, 0o600, "")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, &asking{driver: r.driver, refused: func() { cancel(errRefused) }})
	defer context.AfterFunc(ctx, server.Stop)()
	if err := server.Serve(listener); err != nil && ctx.Err() == nil {
		return err
	}
	return context.Cause(ctx)
}

// asking answers kubelet on one socket.
type asking struct {
	registration.UnimplementedRegistrationServer

	driver  *Driver
	refused func()
}

// GetInfo tells kubelet who we are.
func (a *asking) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	config := a.driver.config
	return &registration.PluginInfo{
		Type: registration.CSIPlugin, Name: config.Name, Endpoint: config.KubeletEndpoint, SupportedVersions: []string{"1.0.0"},
	}, nil
}

// NotifyRegistrationStatus hears kubelet's verdict.
func (a *asking) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if s.GetPluginRegistered() {
		a.driver.log.Info("registered")
	} else {
		a.driver.log.Error("kubelet refused the driver; registering again", zap.String("reason", s.GetError()), zap.Duration("in", againAfter))
		a.refused()
	}
	return &registration.RegistrationStatusResponse{}, nil
}
