package driver

import (
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// access is a volume capability that the driver supports.
type access struct {
	block    bool
	readOnly bool // by the access mode
	sole     bool
	fsType   string
	flags    []string
}

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
		if a.fsType = mount.GetFsType(); a.fsType == "" {
			a.fsType = fileSystems[0]
		}
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
