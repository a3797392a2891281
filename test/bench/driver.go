package main

import (
	"context"
	"errors"
	"net"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const driverName = "bench.crust-proxy.dev"

// driver is a CSI driver that answers at once, with answers of a usual size.
type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	csi.UnimplementedSnapshotMetadataServer
	registration.UnimplementedRegistrationServer
	endpoint string
}

func (*driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: driverName, VendorVersion: "1"}, nil
}

func (*driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: "node-1", MaxVolumesPerNode: 64, AccessibleTopology: &csi.Topology{
		Segments: map[string]string{"topology.bench.crust-proxy.dev/zone": "zone-1"},
	}}, nil
}

func (*driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{}, nil
}

// GetMetadataAllocated sends as many messages as the volume's name says, with as
// many extents each as are asked for.
func (*driver) GetMetadataAllocated(req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	count, err := strconv.Atoi(req.GetSnapshotId())
	if err != nil {
		return err
	}
	reply := &csi.GetMetadataAllocatedResponse{VolumeCapacityBytes: 1 << 40}
	for n := range int64(req.GetMaxResults()) {
		reply.BlockMetadata = append(reply.BlockMetadata, &csi.BlockMetadata{ByteOffset: 1<<35 + n<<16, SizeBytes: 1 << 16})
	}
	for range count {
		if err := stream.Send(reply); err != nil {
			return err
		}
	}
	return nil
}

func (d *driver) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: driverName, Endpoint: d.endpoint, SupportedVersions: []string{"1.0.0"}}, nil
}

func (*driver) NotifyRegistrationStatus(context.Context, *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	return &registration.RegistrationStatusResponse{}, nil
}

// serveDriver serves CSI on one socket and the registrar's protocol on another.
func serveDriver(socket, registrar string) error {
	return serveCSI(&driver{endpoint: socket}, socket, registrar)
}

// node is what is served of a driver.
type node interface {
	csi.IdentityServer
	csi.NodeServer
	csi.SnapshotMetadataServer
	registration.RegistrationServer
}

func serveCSI(d node, socket, registrar string, options ...grpc.ServerOption) error {
	ended := make(chan error, 2)
	for path, register := range map[string]func(*grpc.Server){
		socket: func(s *grpc.Server) {
			csi.RegisterIdentityServer(s, d)
			csi.RegisterNodeServer(s, d)
			csi.RegisterSnapshotMetadataServer(s, d)
		},
		registrar: func(s *grpc.Server) { registration.RegisterRegistrationServer(s, d) },
	} {
		listener, err := net.Listen("unix", path)
		if err != nil {
			return err
		}
		server := grpc.NewServer(options...)
		register(server)
		go func() { ended <- server.Serve(listener) }()
	}
	return errors.Join(<-ended, errors.New("the driver serves no more"))
}
