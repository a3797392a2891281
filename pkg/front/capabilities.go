package front

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
)

// capabilities are what a driver's node plugin says it can do.
type capabilities struct {
	stage     bool
	stats     bool
	expand    bool
	condition bool
	// native: the driver can defer by itself; group and policy: it passes on who
	// shall own the files.
	native bool
	group  bool
	policy bool
	// byKEP are the values that KEP-2857 proposed, and that CSI 1.13 gave to
	// something else: what they mean is to be found out.
	byKEP []csiv1.NodeCapability
}

// kepOffset is what lies between KEP-2857's numbers and ours.
const kepOffset = csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS - 7

func readCapabilities(reply *csi.NodeGetCapabilitiesResponse) *capabilities {
	c := &capabilities{}
	for _, one := range reply.GetCapabilities() {
		switch kind := one.GetRpc().GetType(); kind {
		case csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME:
			c.stage = true
		case csi.NodeServiceCapability_RPC_GET_VOLUME_STATS:
			c.stats = true
		case csi.NodeServiceCapability_RPC_EXPAND_VOLUME:
			c.expand = true
		case csi.NodeServiceCapability_RPC_VOLUME_CONDITION:
			c.condition = true
		case 7, 8, 9:
			c.byKEP = append(c.byKEP, csiv1.NodeCapability(kind)+kepOffset)
		default:
			c.readDeferral(csiv1.NodeCapability(kind))
		}
	}
	return c
}

// healthMethod is what CSI 1.13 means by the value that KEP-2857 had proposed for
// DEFER_FS_OPS. A driver that means that answers this call, if only to refuse a
// request without a volume.
const healthMethod = "/csi.v1.Node/NodeGetVolumeHealth"

// settle finds out what a driver means by KEP-2857's numbers.
func (n *node) settle(ctx context.Context, has *capabilities) error {
	if has.native || !slices.Contains(has.byKEP, csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS) {
		return nil
	}
	err := n.call(ctx, healthMethod, &csi.NodeGetVolumeStatsRequest{}, &csi.NodeGetVolumeStatsResponse{})
	switch code := status.Code(err); code {
	case codes.Unimplemented:
		for _, kind := range has.byKEP {
			has.readDeferral(kind)
		}
		return nil
	case codes.Canceled, codes.DeadlineExceeded, codes.Unavailable:
		return n.driverError("asked for the health of a volume, to know what it can do", err, nil)
	default:
		return nil
	}
}

func (c *capabilities) readDeferral(kind csiv1.NodeCapability) {
	switch kind {
	case csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS:
		c.native = true
	case csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP:
		c.group = true
	case csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY:
		c.policy = true
	default:
	}
}

// offered are the capabilities that kubelet is told of whatever the driver has:
// it never asks for the stats or the growth of a driver's volumes otherwise.
var offered = []csi.NodeServiceCapability_RPC_Type{
	csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
	csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
	csi.NodeServiceCapability_RPC_VOLUME_CONDITION,
}

// getCapabilities answers with the driver's capabilities and ours.
func (n *node) getCapabilities(ctx context.Context, request []byte, forward forwardFunc) ([]byte, error) {
	raw, err := forward(ctx, request)
	if err != nil {
		return nil, err
	}
	reply := &csi.NodeGetCapabilitiesResponse{}
	if err := proto.Unmarshal(raw, reply); err != nil {
		return raw, nil //nolint:nilerr // what we cannot read is kubelet's to judge
	}
	n.known.Store(readCapabilities(reply))
	missing := slices.DeleteFunc(slices.Clone(offered), func(kind csi.NodeServiceCapability_RPC_Type) bool {
		return slices.ContainsFunc(reply.GetCapabilities(), func(c *csi.NodeServiceCapability) bool {
			return c.GetRpc().GetType() == kind
		})
	})
	if len(missing) == 0 {
		return raw, nil
	}
	for _, kind := range missing {
		reply.Capabilities = append(reply.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: kind}},
		})
	}
	return proto.Marshal(reply)
}

// capabilities asks the driver anew: it may have been upgraded or downgraded
// since it was asked last.
func (n *node) capabilities(ctx context.Context) (*capabilities, error) {
	reply := &csi.NodeGetCapabilitiesResponse{}
	err := n.call(ctx, csi.Node_NodeGetCapabilities_FullMethodName, &csi.NodeGetCapabilitiesRequest{}, reply)
	if err != nil {
		return nil, n.driverError("asked for its capabilities", err, nil)
	}
	found := readCapabilities(reply)
	if err := n.settle(ctx, found); err != nil {
		return nil, err
	}
	n.known.Store(found)
	return found, nil
}

// lastCapabilities are those that the driver told last, or nil.
func (n *node) lastCapabilities() *capabilities { return n.known.Load() }
