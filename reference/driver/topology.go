package driver

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// topologyKey is the key of the segment that says on which node a volume is.
func (c Config) topologyKey() string { return "topology." + c.Name + "/node" }

func (c Config) topology() *csi.Topology {
	return &csi.Topology{Segments: map[string]string{c.topologyKey(): c.NodeID}}
}

// checkTopology refuses a volume that must not be on this node.
func (c Config) checkTopology(want *csi.TopologyRequirement) error {
	if len(want.GetRequisite()) == 0 {
		return nil
	}
	for _, one := range want.GetRequisite() {
		if node, ok := one.GetSegments()[c.topologyKey()]; !ok || node == c.NodeID {
			return nil
		}
	}
	return status.Errorf(codes.ResourceExhausted, "accessibility_requirements: volumes are on node %s only", c.NodeID)
}

func (c Config) describe(r *record) *csi.Volume {
	return &csi.Volume{
		VolumeId: r.ID, CapacityBytes: r.Capacity, ContentSource: r.Source.content(),
		AccessibleTopology: []*csi.Topology{c.topology()},
	}
}
