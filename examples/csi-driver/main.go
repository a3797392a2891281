// Command csi-driver is a small CSI driver, to be copied. Its volumes are image files on one node, attached
// as loop devices; yours attaches disks. Where crust-proxy asks it to, it leaves a volume's filesystem to the
// pod's sandbox; what it does for that is marked "Deferred". docs/driver-authors.md has the rules.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/mount-utils"
	utilexec "k8s.io/utils/exec"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
)

type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer
	registration.UnimplementedRegistrationServer

	name, node, data, endpoint string
	mounter                    *mount.SafeFormatAndMount
	mu                         sync.Mutex
}

func main() {
	d := &driver{mounter: mount.NewSafeFormatAndMount(mount.New(""), utilexec.New())}
	flag.StringVar(&d.name, "name", "example.crust-proxy.dev", "name of the driver")
	flag.StringVar(&d.node, "node", "node-1", "name of this node")
	flag.StringVar(&d.data, "data", "/var/lib/csi-example", "directory of the volumes")
	flag.StringVar(&d.endpoint, "endpoint", "/var/lib/kubelet/plugins/example.crust-proxy.dev/csi.sock", "socket to serve")
	// Behind crust-proxy: in its directory. Without it: in /var/lib/kubelet/plugins_registry.
	register := flag.String("registration", "/var/lib/kubelet/crust-proxy/registry/example-reg.sock", "socket on which to register")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := d.run(ctx, *register)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "csi-driver:", err)
		os.Exit(1)
	}
}

func (d *driver) run(ctx context.Context, register string) error {
	if err := os.MkdirAll(d.data, 0o700); err != nil {
		return err
	}
	// Deferred: csidefer reports the capability and the filesystems.
	deferring := csidefer.UnaryInterceptor(csidefer.Options{FileSystems: fileSystems})
	server, registrar := grpc.NewServer(grpc.ChainUnaryInterceptor(deferring, d.oneAtATime)), grpc.NewServer()
	csi.RegisterIdentityServer(server, d)
	csi.RegisterControllerServer(server, d)
	csi.RegisterNodeServer(server, d)
	registration.RegisterRegistrationServer(registrar, d)
	ended := make(chan error, 2)
	for socket, one := range map[string]*grpc.Server{d.endpoint: server, register: registrar} {
		if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		listener, err := net.Listen("unix", socket)
		if err != nil {
			return err
		}
		context.AfterFunc(ctx, one.Stop)
		go func() { ended <- one.Serve(listener) }()
	}
	return <-ended
}

// oneAtATime is enough here. Your driver has a lock for each volume.
func (d *driver) oneAtATime(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return handle(ctx, req)
}

func (d *driver) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: d.name, Endpoint: d.endpoint, SupportedVersions: []string{"1.0.0"}}, nil
}

func (*driver) NotifyRegistrationStatus(_ context.Context, is *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	fmt.Fprintln(os.Stderr, "csi-driver: registered:", is.GetPluginRegistered(), is.GetError())
	return &registration.RegistrationStatusResponse{}, nil
}

func (d *driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.name, VendorVersion: "0.1.0"}, nil
}

func (*driver) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	service := &csi.PluginCapability_Service{Type: csi.PluginCapability_Service_CONTROLLER_SERVICE}
	return &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{{Type: &csi.PluginCapability_Service_{Service: service}}}}, nil
}

func (*driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{}, nil
}

func (*driver) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	reply := &csi.ControllerGetCapabilitiesResponse{}
	for _, kind := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
	} {
		rpc := &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: kind}}
		reply.Capabilities = append(reply.Capabilities, &csi.ControllerServiceCapability{Type: rpc})
	}
	return reply, nil
}

func (*driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	reply := &csi.NodeGetCapabilitiesResponse{}
	for _, kind := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
	} {
		rpc := &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: kind}}
		reply.Capabilities = append(reply.Capabilities, &csi.NodeServiceCapability{Type: rpc})
	}
	return reply, nil
}

func (d *driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.node}, nil
}
