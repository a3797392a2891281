package registry

import (
	"context"
	"sync"

	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// offer is a registration socket in kubelet's directory.
type offer struct {
	registration.UnimplementedRegistrationServer
	name   string
	path   string
	id     socketID
	info   *registration.PluginInfo
	server *grpc.Server
	ended  chan struct{}

	mu    sync.Mutex                            // of the senders
	heard chan *registration.RegistrationStatus // the latest
}

var _ registration.RegistrationServer = (*offer)(nil)

// GetInfo tells kubelet who the driver is.
func (o *offer) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return o.info, nil
}

// NotifyRegistrationStatus takes kubelet's verdict; the latest counts. It does not
// wait for the registrar, who may hang.
func (o *offer) NotifyRegistrationStatus(_ context.Context, word *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	select {
	case <-o.heard:
	default:
	}
	o.heard <- word
	return &registration.RegistrationStatusResponse{}, nil
}

func (o *offer) stands() bool { return idAt(o.path) == o.id }

func (o *offer) end() {
	o.server.Stop()
	<-o.ended
}
