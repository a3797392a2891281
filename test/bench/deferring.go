package main

import (
	"context"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
)

// deferringDriver is a CSI driver that can defer by itself. Its volumes are image
// files, named by the volumes' ids, of which a machine has room for thousands.
type deferringDriver struct {
	driver
	images string
}

func (*deferringDriver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{Capabilities: []*csi.NodeServiceCapability{
		{Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME}}},
	}}, nil
}

func (*deferringDriver) NodeStageVolume(context.Context, *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	return &csi.NodeStageVolumeResponse{}, nil
}

func (d *deferringDriver) NodePublishVolume(_ context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	reply := &csi.NodePublishVolumeResponse{}
	if csidefer.Requested(req) {
		csidefer.Respond(reply, csidefer.Mount{Device: filepath.Join(d.images, req.GetVolumeId()), FSType: "ext4", Flags: []string{"noatime"}})
	}
	return reply, nil
}

// serveDeferring is serveDriver for one that can defer.
func serveDeferring(socket, registrar, images string) error {
	return serveCSI(&deferringDriver{driver: driver{endpoint: socket}, images: images}, socket, registrar,
		csidefer.ServerOption(csidefer.Options{}))
}
