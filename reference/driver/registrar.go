package driver

import (
	"context"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/crust-proxy/crust-proxy/internal/ground/peercred"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// againAfter is the wait after a refusal. kubelet tries a socket only once, so that it has to
// be made anew.
const againAfter = time.Second

// register registers the driver with kubelet, as the sidecar node-driver-registrar does, until
// ctx ends.
func (d *Driver) register(ctx context.Context) error {
	for {
		if err := d.offer(ctx); err != nil || !sys.Sleep(ctx, againAfter) {
			return err
		}
	}
}

// offer serves the registration socket until ctx ends or kubelet refuses.
func (d *Driver) offer(ctx context.Context) error {
	listener, err := peercred.Listen(d.config.RegistrationSocket, 0o600, "")
	if err != nil {
		return err
	}
	ctx, end := context.WithCancel(ctx)
	defer end()
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, &registrationServer{driver: d, refused: end})
	defer context.AfterFunc(ctx, server.Stop)()
	if err := server.Serve(listener); ctx.Err() == nil {
		return err
	}
	return nil
}

// registrationServer answers kubelet on one socket.
type registrationServer struct {
	registration.UnimplementedRegistrationServer

	driver  *Driver
	refused func()
}

// GetInfo tells kubelet the driver's name and socket.
func (a *registrationServer) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	config := a.driver.config
	return &registration.PluginInfo{
		Type: registration.CSIPlugin, Name: config.Name, Endpoint: config.KubeletEndpoint, SupportedVersions: []string{"1.0.0"},
	}, nil
}

// NotifyRegistrationStatus receives kubelet's decision.
func (a *registrationServer) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if s.GetPluginRegistered() {
		a.driver.log.Info("registered")
	} else {
		a.driver.log.Error("kubelet refused the driver; registering again", zap.String("reason", s.GetError()), zap.Duration("in", againAfter))
		a.refused()
	}
	return &registration.RegistrationStatusResponse{}, nil
}
