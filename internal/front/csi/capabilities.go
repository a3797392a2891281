package csi

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// getCapabilities adds to the driver's capabilities those without which kubelet never asks for
// stats, growth or health of its volumes. If the driver hangs the last known ones are used: kubelet asks
// for them before it asks for the health of each volume, and the others must not wait.
func getCapabilities(ctx context.Context, p *driverProxy, _ []byte, forward forwardFunc) ([]byte, error) {
	last, waiting := p.driver.LastCapabilities(), ctx
	if last != nil {
		var cancel context.CancelFunc
		waiting, cancel = context.WithTimeout(ctx, healthTimeout)
		defer cancel()
	}
	answer, err := forward(waiting)
	if last != nil && status.Code(err) == codes.DeadlineExceeded && ctx.Err() == nil {
		p.log.Warn("the driver does not report its capabilities, and its last known ones are used", zap.Duration("waited", healthTimeout))
		answer, err = proto.Marshal(last.Reply)
	}
	if err != nil {
		return nil, err
	}
	reply := &csi.NodeGetCapabilitiesResponse{}
	if err := proto.Unmarshal(answer, reply); err != nil {
		return answer, nil //nolint:nilerr // kubelet gets an answer that cannot be parsed as it is
	}
	p.driver.ObserveCapabilities(reply)
	offered := []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
	}
	if p.cfg.VolumeCondition {
		offered = append(offered, volumeConditionCapability)
	}
	before := len(reply.GetCapabilities())
	for _, kind := range offered {
		has := func(c *csi.NodeServiceCapability) bool { return c.GetRpc().GetType() == kind }
		if !slices.ContainsFunc(reply.GetCapabilities(), has) {
			reply.Capabilities = append(reply.Capabilities, &csi.NodeServiceCapability{
				Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: kind}},
			})
		}
	}
	if len(reply.GetCapabilities()) == before {
		return answer, nil
	}
	return proto.Marshal(reply)
}
