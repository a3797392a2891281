package crustdriver

import (
	"context"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// maxVolumes is how many volumes the scheduler may put on a node.
const maxVolumes = 256

// NodeGetCapabilities tells what the node plugin can do; csidefer adds deferral.
func (d *Driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	reply := &csi.NodeGetCapabilitiesResponse{}
	for _, kind := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_VOLUME_CONDITION,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		reply.Capabilities = append(reply.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: kind}},
		})
	}
	return reply, nil
}

// NodeGetInfo tells which node this is.
func (d *Driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.config.NodeID, MaxVolumesPerNode: maxVolumes, AccessibleTopology: d.topology()}, nil
}

// present gives what was asked for on this node since it booted, or nil.
func (d *Driver) present(r *record) *node {
	if r == nil || r.Node == nil || r.Node.Boot != d.boot {
		return nil
	}
	return r.Node
}

// checkPath wants the absolute path of a staging or target place.
func checkPath(field, path string) error {
	if path == "" || !filepath.IsAbs(path) {
		return status.Errorf(codes.InvalidArgument, "%s must be an absolute path", field)
	}
	return nil
}

func checkID(id string) error {
	if id == "" || len(id) > maxID {
		return status.Errorf(codes.InvalidArgument, "volume_id is missing, or longer than %d bytes", maxID)
	}
	return nil
}
