package csifront

import (
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// offered are the capabilities that kubelet is told of whatever the driver has:
// otherwise it never asks for the stats or the growth of a driver's volumes.
var offered = []csi.NodeServiceCapability_RPC_Type{
	csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
	csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
	csi.NodeServiceCapability_RPC_VOLUME_CONDITION,
}

// addOffered adds the offered capabilities that a driver's answer lacks, and reports
// whether it lacked any.
func addOffered(reply *csi.NodeGetCapabilitiesResponse) (added bool) {
	for _, kind := range offered {
		if slices.ContainsFunc(reply.GetCapabilities(), func(c *csi.NodeServiceCapability) bool { return c.GetRpc().GetType() == kind }) {
			continue
		}
		added = true
		reply.Capabilities = append(reply.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: kind}},
		})
	}
	return added
}
