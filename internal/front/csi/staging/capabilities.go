package staging

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
)

// Capabilities are those that a driver's node plugin reports.
type Capabilities struct {
	Stage, Stats, Expand, Health bool
	// Native: the driver can defer by itself.
	Native bool
	// Group and Policy: the driver passes on the group that shall own the files, and when to change their group.
	Group, Policy bool
	// Kinds are what the driver reported, each once, and at most mostKinds.
	Kinds []csi.NodeServiceCapability_RPC_Type
}

const mostKinds = 64

// LongestCapabilities is the longest answer that is parsed: one of 4 MiB can have 700,000 entries.
const LongestCapabilities = 64 << 10

// ObserveCapabilities stores what the driver has just reported.
func (d *Driver) ObserveCapabilities(reply *csi.NodeGetCapabilitiesResponse) *Capabilities {
	c := &Capabilities{}
	reported := map[int32]*bool{
		int32(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME):                                      &c.Stage,
		int32(csi.NodeServiceCapability_RPC_GET_VOLUME_STATS):                                          &c.Stats,
		int32(csi.NodeServiceCapability_RPC_EXPAND_VOLUME):                                             &c.Expand,
		int32(csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH):                                         &c.Health,
		int32(csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS):                                       &c.Native,
		int32(csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP):               &c.Group,
		int32(csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY): &c.Policy,
	}
	for _, one := range reply.GetCapabilities() {
		kind := one.GetRpc().GetType()
		if has := reported[int32(kind)]; has != nil {
			*has = true
		}
		if len(c.Kinds) < mostKinds && !slices.Contains(c.Kinds, kind) {
			c.Kinds = append(c.Kinds, kind)
		}
	}
	d.known.Store(c)
	d.silent.Store(nil)
	return c
}

// Capabilities asks the driver anew: it may have been upgraded or downgraded since the last call.
func (d *Driver) Capabilities(ctx context.Context) (*Capabilities, error) {
	reply, err := d.Node.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{}, grpc.MaxCallRecvMsgSize(LongestCapabilities))
	if err != nil {
		return nil, d.Error("asked for its capabilities", err, nil)
	}
	return d.ObserveCapabilities(reply), nil
}

// LastCapabilities are those that the driver reported last, or nil.
func (d *Driver) LastCapabilities() *Capabilities { return d.known.Load() }
