package driver

import (
	"context"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// identity serves CSI's Identity.
type identity struct {
	csi.UnimplementedIdentityServer

	config Config
	pool   *pool
	// snapshots: the driver can make snapshots, and so serves groups and changed blocks.
	snapshots bool
}

// GetPluginInfo returns the name and version.
func (i *identity) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: i.config.Name, VendorVersion: sys.Version()}, nil
}

// GetPluginCapabilities lists the services of the driver.
func (i *identity) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	service := func(kind csi.PluginCapability_Service_Type) *csi.PluginCapability {
		return &csi.PluginCapability{Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: kind}}}
	}
	reply := &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{
		service(csi.PluginCapability_Service_CONTROLLER_SERVICE),
		service(csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS),
		{Type: &csi.PluginCapability_VolumeExpansion_{VolumeExpansion: &csi.PluginCapability_VolumeExpansion{
			Type: csi.PluginCapability_VolumeExpansion_ONLINE,
		}}},
	}}
	if i.snapshots {
		reply.Capabilities = append(reply.Capabilities, service(csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE),
			service(csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE))
	}
	return reply, nil
}

// Probe checks that images can be written and loop devices attached.
func (i *identity) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	if err := unix.Access(i.pool.images, unix.W_OK); err != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "the data directory %s: %v", i.config.DataDir, err)
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "no loop devices: %v; load the kernel's module loop", err)
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}
