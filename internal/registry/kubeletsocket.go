package registry

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
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

// listenAt has the socket appear closed to others and listening: kubelet, which
// tries once, could come between the making and the listening. It overlooks the
// hidden name; a directory it would look into.
func listenAt(path, hidden string) (*net.UnixListener, error) {
	if err := remove(hidden); err != nil {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: hidden, Net: "unix"})
	if err != nil {
		return nil, err
	}
	listener.SetUnlinkOnClose(false)
	err = os.Chmod(hidden, 0o600)
	if err == nil {
		err = os.Rename(hidden, path)
	}
	if err != nil {
		return nil, errors.Join(err, listener.Close(), remove(hidden))
	}
	return listener, nil
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

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
