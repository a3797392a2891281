package crustdriver

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// topologyKey names the segment that says on which node a volume is.
func (d *Driver) topologyKey() string { return "topology." + d.config.Name + "/node" }

func (d *Driver) topology() *csi.Topology {
	return &csi.Topology{Segments: map[string]string{d.topologyKey(): d.config.NodeID}}
}

// checkTopology refuses volumes that must not be on this node.
func (d *Driver) checkTopology(want *csi.TopologyRequirement) error {
	if len(want.GetRequisite()) == 0 {
		return nil
	}
	for _, one := range want.GetRequisite() {
		if node, ok := one.GetSegments()[d.topologyKey()]; !ok || node == d.config.NodeID {
			return nil
		}
	}
	return status.Errorf(codes.ResourceExhausted, "accessibility_requirements: volumes are on node %s only", d.config.NodeID)
}

func (d *Driver) describe(r *record) *csi.Volume {
	return &csi.Volume{VolumeId: r.ID, CapacityBytes: r.Capacity, AccessibleTopology: []*csi.Topology{d.topology()}}
}
