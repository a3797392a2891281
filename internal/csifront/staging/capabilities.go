package staging

import (
	"context"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
)

// Capabilities are those that a driver's node plugin reports.
type Capabilities struct {
	Stage, Stats, Expand bool
	// Health: it reports GET_VOLUME_HEALTH, or means deferral by that number (byKEP).
	Health bool
	// Native: the driver can defer by itself.
	Native bool
	// Group and Policy: the driver passes on the group that shall own the files, and when
	// to change their group.
	Group, Policy bool
	// byKEP are the values that KEP-2857 proposed and that mean something else in CSI 1.13.
	// resolveKEPNumbers finds out which.
	byKEP []csiv1.NodeCapability
	// byCSI: the driver was found to mean what CSI does.
	byCSI bool
}

// kepOffset is the difference between our numbers and KEP-2857's.
const kepOffset = csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS - 7

func readCapabilities(reply *csi.NodeGetCapabilitiesResponse) *Capabilities {
	c := &Capabilities{}
	for _, one := range reply.GetCapabilities() {
		switch kind := one.GetRpc().GetType(); kind {
		case csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME:
			c.Stage = true
		case csi.NodeServiceCapability_RPC_GET_VOLUME_STATS:
			c.Stats = true
		case csi.NodeServiceCapability_RPC_EXPAND_VOLUME:
			c.Expand = true
		case 7, 8, 9:
			c.Health = c.Health || kind == csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH
			c.byKEP = append(c.byKEP, csiv1.NodeCapability(kind)+kepOffset)
		default:
			c.readDeferral(csiv1.NodeCapability(kind))
		}
	}
	return c
}

// resolveKEPNumbers finds out what a driver means by KEP-2857's numbers. One that means
// CSI's GET_VOLUME_HEALTH answers that call, if only to refuse a request without a volume.
func (d *Driver) resolveKEPNumbers(ctx context.Context, has *Capabilities) error {
	if has.Native || !slices.Contains(has.byKEP, csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS) {
		return nil
	}
	_, err := d.Node.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{})
	switch code := status.Code(err); code {
	case codes.Unimplemented:
		for _, kind := range has.byKEP {
			has.readDeferral(kind)
		}
		return nil
	case codes.Canceled, codes.DeadlineExceeded, codes.Unavailable:
		return d.Error("asked for the health of a volume, to know what it can do", err, nil)
	default:
		has.byCSI = true
		return nil
	}
}

// MayDefer reports whether the driver defers by itself, or may do so. A CO sets
// defer_fs_ops only for such a driver. In doubt, also before the driver has reported its
// capabilities, the answer is true.
func (c *Capabilities) MayDefer() bool {
	return c == nil || c.Native || !c.byCSI && slices.Contains(c.byKEP, csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS)
}

func (c *Capabilities) readDeferral(kind csiv1.NodeCapability) {
	switch kind {
	case csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS:
		c.Native = true
	case csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP:
		c.Group = true
	case csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY:
		c.Policy = true
	default:
	}
}

// Capabilities asks the driver anew: it may have been upgraded or downgraded since the
// last call.
func (d *Driver) Capabilities(ctx context.Context) (*Capabilities, error) {
	reply, err := d.Node.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		return nil, d.Error("asked for its capabilities", err, nil)
	}
	found := readCapabilities(reply)
	if err := d.resolveKEPNumbers(ctx, found); err != nil {
		return nil, err
	}
	d.known.Store(found)
	return found, nil
}

// LastCapabilities are those that the driver reported last, or nil.
func (d *Driver) LastCapabilities() *Capabilities { return d.known.Load() }

// observeTime bounds the question what an observed capability means.
const observeTime = 2 * time.Second

// ObserveCapabilities stores the capabilities of an answer that passes through. If it is not
// known yet what they mean, the driver is asked; without an answer they stay in doubt.
func (d *Driver) ObserveCapabilities(ctx context.Context, reply *csi.NodeGetCapabilitiesResponse) {
	has := readCapabilities(reply)
	if last := d.known.Load(); last != nil && last.byCSI && slices.Equal(last.byKEP, has.byKEP) {
		has.byCSI = true
	} else {
		ctx, cancel := context.WithTimeout(ctx, observeTime)
		defer cancel()
		_ = d.resolveKEPNumbers(ctx, has)
	}
	d.known.Store(has)
}
