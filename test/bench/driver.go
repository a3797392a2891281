package main

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
)

const driverName = "bench.crust-proxy.dev"

// driver is a CSI driver that answers at once, with answers of a usual size.
type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	csi.UnimplementedSnapshotMetadataServer
	registration.UnimplementedRegistrationServer
	endpoint string
	// images has the volumes of a driver that can defer by itself: image files, named by
	// the volumes' ids, of which a machine has room for thousands.
	images string
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
	return &csi.NodeGetCapabilitiesResponse{Capabilities: []*csi.NodeServiceCapability{
		{Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME}}},
	}}, nil
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

func (*driver) NodeStageVolume(context.Context, *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	return &csi.NodeStageVolumeResponse{}, nil
}

func (d *driver) NodePublishVolume(_ context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	reply := &csi.NodePublishVolumeResponse{}
	if csidefer.Requested(req) {
		csidefer.Respond(reply, csidefer.Mount{Device: filepath.Join(d.images, req.GetVolumeId()), FSType: "ext4", Flags: []string{"noatime"}})
	}
	return reply, nil
}

// serveDriver serves CSI on one socket and the registrar's protocol on another.
func serveDriver(socket, registrar, images string) error {
	d := &driver{endpoint: socket, images: images}
	var options []grpc.ServerOption
	if images != "" {
		options = append(options, csidefer.ServerOption(csidefer.Options{}))
	}
	ended := make(chan error, 2)
	for _, path := range []string{socket, registrar} {
		listener, err := net.Listen("unix", path)
		if err != nil {
			return err
		}
		server := grpc.NewServer(options...)
		csi.RegisterIdentityServer(server, d)
		csi.RegisterNodeServer(server, d)
		csi.RegisterSnapshotMetadataServer(server, d)
		registration.RegisterRegistrationServer(server, d)
		go func() { ended <- server.Serve(listener) }()
	}
	return errors.Join(<-ended, errors.New("the driver serves no more"))
}
