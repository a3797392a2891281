package csi

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
)

// getCapabilities adds to the driver's capabilities those without which kubelet never asks for stats, growth or health of
// its volumes. If the driver hangs (see Within) or has gone, the last known ones are used: an error here has kubelet forget
// an earlier stage or publish. Without Stage kubelet would not stage, and a driver that has gone may come back with Stage.
func getCapabilities(ctx context.Context, p *driverProxy, _ []byte, forward forwardFunc) ([]byte, error) {
	answer, err := staging.Within(ctx, p.driver, p.front.healthTimeout, forward)
	reply, last := &csi.NodeGetCapabilitiesResponse{}, p.driver.LastCapabilities()
	offered := []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
	}
	if p.cfg.VolumeCondition {
		offered = append(offered, volumeConditionCapability)
	}
	switch {
	case err == nil:
		if len(answer) > staging.LongestCapabilities || proto.Unmarshal(answer, reply) != nil {
			return answer, nil // kubelet gets an answer that is too long, or cannot be parsed, as it is
		}
		p.driver.ObserveCapabilities(reply)
	case last != nil && (p.driver.Silent() || last.Stage && !refusal.IsFinal(err)):
		logHealth(p, "", p.driver.Error("asked for its capabilities", err, nil))
		offered = slices.Concat(last.Kinds, offered)
	default:
		return nil, err
	}
	for _, kind := range offered {
		if !slices.ContainsFunc(reply.GetCapabilities(), func(c *csi.NodeServiceCapability) bool { return c.GetRpc().GetType() == kind }) {
			has := &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: kind}}
			reply.Capabilities = append(reply.Capabilities, &csi.NodeServiceCapability{Type: has})
		}
	}
	return proto.Marshal(reply)
}
