package main

import (
	"context"
	"encoding/json"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

const driverName = "bench.crust-proxy.dev"

// driver is a CSI driver that answers at once, with answers of a usual size.
type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	csi.UnimplementedSnapshotMetadataServer
	// images has the volumes of a driver that can defer by itself: image files, named by
	// the volumes' ids, of which a machine has room for thousands.
	images string
	// directVolumes and sandboxes are Kata's directories.
	directVolumes, sandboxes string
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

// GetMetadataAllocated sends as many messages as the volume's name says, with as many extents each as are asked for.
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

func (*driver) NodeUnpublishVolume(context.Context, *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func (*driver) NodeUnstageVolume(context.Context, *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	return &csi.NodeUnstageVolumeResponse{}, nil
}

// NodeGetVolumeStats is what a driver does that asks Kata's shim by itself.
func (d *driver) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	reply := &csi.NodeGetVolumeStatsResponse{}
	return reply, d.askShim(ctx, req.GetVolumeId(), req.GetVolumePath(), reply)
}

// NodeGetVolumeHealth is the same: a sandbox that answers is healthy.
func (d *driver) NodeGetVolumeHealth(ctx context.Context, req *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	err := d.askShim(ctx, req.GetVolumeId(), req.GetVolumePublishPath(), &csi.NodeGetVolumeStatsResponse{})
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: &csi.VolumeHealth{}}, err
}

// askShim finds the sandbox of a target as Kata's own tool does, and dials its shim.
func (d *driver) askShim(ctx context.Context, id, target string, reply *csi.NodeGetVolumeStatsResponse) error {
	files, err := os.ReadDir(kata.VolumeDir(d.directVolumes, target))
	if err != nil {
		return err
	}
	for _, file := range files {
		if file.Name() == "mountInfo.json" {
			continue
		}
		device := url.QueryEscape(url.QueryEscape(filepath.Join(d.images, id)))
		said, err := rig.Get(ctx, filepath.Join(d.sandboxes, file.Name(), "shim-monitor.sock"), "/direct-volume/stats?path="+device)
		if err != nil {
			return err
		}
		return json.Unmarshal([]byte(said), reply)
	}
	return errors.New("no sandbox has " + target)
}

// serveDriver serves CSI on one socket, beside a registrar: SOCKET REGISTRY IMAGES DIRECT-VOLUMES SANDBOXES.
func serveDriver(args []string) error {
	socket, registry, images := args[0], args[1], args[2]
	var options []grpc.ServerOption
	if images != "" {
		options = append(options, csidefer.ServerOption(csidefer.Options{}))
	}
	registrar := &kubelet.Registrar{Dir: registry, Name: driverName, Endpoint: socket}
	if err := registrar.Start(); err != nil {
		return err
	}
	d := &driver{images: images, directVolumes: args[3], sandboxes: args[4]}
	return serve(socket, func(server *grpc.Server) {
		csi.RegisterIdentityServer(server, d)
		csi.RegisterNodeServer(server, d)
		csi.RegisterSnapshotMetadataServer(server, d)
	}, options...)
}
