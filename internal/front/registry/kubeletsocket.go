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

	mu      sync.Mutex                            // of the senders
	verdict chan *registration.RegistrationStatus // holds the latest one
}

var _ registration.RegistrationServer = (*offer)(nil)

// GetInfo returns the driver's name and CSI socket.
func (o *offer) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return o.info, nil
}

// NotifyRegistrationStatus receives kubelet's verdict; the latest one counts. It does not
// wait for the registrar, which may hang.
func (o *offer) NotifyRegistrationStatus(
	_ context.Context, verdict *registration.RegistrationStatus,
) (*registration.RegistrationStatusResponse, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	select {
	case <-o.verdict:
	default:
	}
	o.verdict <- verdict
	return &registration.RegistrationStatusResponse{}, nil
}

func (o *offer) stands() bool { return idAt(o.path) == o.id }

func (o *offer) end() {
	o.server.Stop()
	<-o.ended
}
