package kubelet

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Driver is a CSI driver with nothing behind it. Fill it in, then start it.
type Driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	Name, Version, Node string
	Socket              string
	// More are further capabilities.
	More []csi.NodeServiceCapability_RPC_Type

	// Hang, if set, holds up NodeGetInfo until the channel is closed or the caller goes. Hangs tells that it has.
	Hang  atomic.Pointer[chan struct{}]
	Hangs atomic.Bool
	fail  atomic.Pointer[error]

	mu      sync.Mutex
	process *rig.Server
}

// Start serves it; a socket of an earlier life is replaced.
func (d *Driver) Start() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	process, err := rig.Serve(d.Socket, func(s *grpc.Server) {
		csi.RegisterIdentityServer(s, d)
		csi.RegisterNodeServer(s, d)
	})
	if err == nil {
		d.process = process
	}
	return err
}

// Kill ends it and leaves its socket behind.
func (d *Driver) Kill() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.process != nil {
		d.process.Kill()
	}
	d.process = nil
}

// FailNodeGetInfo has NodeGetInfo fail, until it is called with nil.
func (d *Driver) FailNodeGetInfo(err error) {
	if err == nil {
		d.fail.Store(nil)
		return
	}
	d.fail.Store(&err)
}

// GetPluginInfo answers with its name.
func (d *Driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.Name, VendorVersion: d.Version}, nil
}

// Probe answers that it is ready.
func (d *Driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

// NodeGetInfo answers with its node.
func (d *Driver) NodeGetInfo(ctx context.Context, _ *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	if hang := d.Hang.Load(); hang != nil {
		d.Hangs.Store(true)
		select {
		case <-*hang:
		case <-ctx.Done():
		}
	}
	if failure := d.fail.Load(); failure != nil {
		return nil, *failure
	}
	return &csi.NodeGetInfoResponse{NodeId: d.Node}, nil
}

// NodeGetCapabilities answers that it stages and expands, and with More.
func (d *Driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	var has []*csi.NodeServiceCapability
	for _, kind := range append([]csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
	}, d.More...) {
		has = append(has, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: kind}},
		})
	}
	return &csi.NodeGetCapabilitiesResponse{Capabilities: has}, nil
}
