package driver

import (
	"cmp"
	"os"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/disk/superblock"
)

// access is a volume capability that the driver supports.
type access struct {
	block    bool
	readOnly bool // by the access mode
	sole     bool
	fsType   string
	flags    []string
}

// readsOnly reports whether nothing may be written to the volume.
func (a access) readsOnly() bool { return a.readOnly || slices.Contains(a.flags, "ro") }

func readAccess(capability *csi.VolumeCapability) (access, error) {
	var a access
	refuse := func(why string) (access, error) {
		return a, status.Error(codes.InvalidArgument, "volume_capability: "+why)
	}
	switch mode := capability.GetAccessMode().GetMode(); mode {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER:
		a.sole = true
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY, csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:
		a.readOnly = true
	default:
		return refuse("a volume lies on one node: the access mode " + mode.String() + " is not offered")
	}
	switch {
	case capability.GetBlock() != nil:
		a.block = true
	case capability.GetMount() != nil:
		mount := capability.GetMount()
		a.flags = mount.GetMountFlags()
		a.fsType = cmp.Or(mount.GetFsType(), fileSystems[0])
		if !slices.Contains(fileSystems, a.fsType) {
			return refuse("the filesystem is not one of ext4, xfs and btrfs")
		}
		if mount.GetVolumeMountGroup() != "" {
			return refuse("volume_mount_group is given, but this driver does not report VOLUME_MOUNT_GROUP")
		}
	default:
		return refuse("neither mount nor block access is asked for")
	}
	return a, nil
}

func readAccesses(capabilities []*csi.VolumeCapability) error {
	if len(capabilities) == 0 {
		return status.Error(codes.InvalidArgument, "volume_capabilities are missing")
	}
	for _, one := range capabilities {
		if _, err := readAccess(one); err != nil {
			return err
		}
	}
	return nil
}

const (
	sizeGrain   = 4096
	defaultSize = 1 << 30
	leastSize   = 1 << 20
	mostSize    = 1 << 50
)

// readRange chooses a size in a capacity range.
func readRange(r *csi.CapacityRange) (int64, error) {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	if required < 0 || limit < 0 || limit > 0 && required > limit {
		return 0, status.Errorf(codes.InvalidArgument, "capacity_range: %d bytes are required and %d are the limit", required, limit)
	}
	size := cmp.Or(required, defaultSize)
	if required == 0 && limit > 0 {
		size = min(size, limit/sizeGrain*sizeGrain)
	}
	if size > mostSize {
		return 0, status.Errorf(codes.OutOfRange, "capacity_range: %d bytes are more than the %d a volume can have", size, int64(mostSize))
	}
	size = (max(size, leastSize) + sizeGrain - 1) / sizeGrain * sizeGrain
	if limit > 0 && size > limit {
		return 0, status.Errorf(codes.OutOfRange,
			"capacity_range: no multiple of %d from %d on lies within the limit of %d", sizeGrain, max(required, leastSize), limit)
	}
	return size, nil
}

// sizeOfClone chooses the size of a clone: that of its source, unless the request asks for more.
func sizeOfClone(least int64, r *csi.CapacityRange) (int64, error) {
	size := least
	if r.GetRequiredBytes() > 0 {
		var err error
		if size, err = readRange(r); err != nil {
			return 0, err
		}
	}
	if limit := r.GetLimitBytes(); size < least || limit > 0 && size > limit {
		return 0, status.Errorf(codes.OutOfRange, "capacity_range: the source has %d bytes, and a volume with its content cannot have fewer", least)
	}
	return size, nil
}

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

func (s source) content() *csi.VolumeContentSource {
	switch {
	case s.Volume != "":
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: s.Volume},
		}}
	case s.Snapshot != "":
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: s.Snapshot},
		}}
	}
	return nil
}

func (c *cloner) find(s source) (*record, error) {
	if !c.able() {
		return nil, status.Error(codes.InvalidArgument, noClones)
	}
	from, err := c.pool.store.load(s.id())
	switch {
	case err != nil:
		return nil, err
	case from == nil || !from.Ready || (from.Snapshot != nil) != (s.Snapshot != ""):
		return nil, status.Errorf(codes.NotFound, "there is no %v on node %s", s, c.pool.config.NodeID)
	case from.Ephemeral:
		return nil, status.Errorf(codes.InvalidArgument, "%v is ephemeral: it belongs to its pod alone", s)
	}
	return from, nil
}

// checkContent refuses a clone that is to be mounted as another filesystem than the source holds: it could never be
// mounted. How the source itself is used does not matter, so that a filesystem can be cloned as a block volume.
func (c *cloner) checkContent(from *record, capabilities []*csi.VolumeCapability) error {
	image, err := c.pool.openImage(from, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer func() { _ = image.Close() }()
	for _, holds := range fileSystems {
		if _, err := superblock.Read(image, holds); err != nil {
			continue // another filesystem, or none
		}
		for _, capability := range capabilities {
			want, err := readAccess(capability)
			if err == nil && !want.block && want.fsType != holds {
				err = status.Errorf(codes.InvalidArgument, "volume_content_source: %q holds %s, and the volume is to be mounted as %s",
					from.ID, holds, want.fsType)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}
