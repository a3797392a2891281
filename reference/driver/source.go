package driver

import (
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/disk/superblock"
)

func readSource(content *csi.VolumeContentSource) (source, error) {
	from := source{Volume: content.GetVolume().GetVolumeId(), Snapshot: content.GetSnapshot().GetSnapshotId()}
	if content != nil && from.id() == "" {
		return from, status.Error(codes.InvalidArgument, "volume_content_source names neither a volume nor a snapshot")
	}
	return from, nil
}

// content converts a source to CSI's type.
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

// find returns the record of a source.
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

// checkContent refuses a clone that is to be mounted as another filesystem than the source
// holds: it could never be mounted. How the source itself is used does not matter, so that a
// filesystem can be cloned as a block volume.
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
