package driver

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
)

type (
	volumeFaults  = []*csi.VolumeHealth_VolumeHealthEntry
	storageFaults = []*csi.NodeGetStorageHealthResponse_StorageBackendHealth
)

func volumeFault(kind csi.VolumeHealthErrorType, reason, message string) volumeFaults {
	return volumeFaults{{Status: kind, Reason: reason, Message: message}}
}

// checkImage checks the image of a volume, which need not be attached.
func (l *pool) checkImage(r *record) volumeFaults {
	info, err := os.Stat(l.image(r.ID))
	if err != nil {
		return volumeFault(csi.VolumeHealthErrorType_INACCESSIBLE, "ImageMissing", "the image cannot be seen: "+err.Error())
	}
	if info.Size() < r.Capacity {
		// It may be an expansion that was interrupted, and no loss of data.
		return volumeFault(csi.VolumeHealthErrorType_DEGRADED, "ImageTooSmall",
			fmt.Sprintf("the image has %d bytes instead of %d", info.Size(), r.Capacity))
	}
	return nil
}

// checkNode checks the loop device of a volume that is staged on this node, and its filesystem
// if that is mounted here, which that of a deferred volume is not.
func (l *pool) checkNode(r *record, there *node, target string) volumeFaults {
	if _, err := os.Stat(l.image(r.ID)); err != nil {
		return nil // it was removed a moment ago
	}
	if devices, err := loopdev.Over(l.image(r.ID)); err != nil || len(devices) == 0 {
		return volumeFault(csi.VolumeHealthErrorType_INACCESSIBLE, "DeviceDetached", "no loop device is attached to the image")
	}
	if there.Block {
		return nil
	}
	for _, path := range []string{target, there.Staging} {
		if path == "" {
			continue
		}
		if m, err := l.mountedAt(r.ID, path); err == nil && m != nil {
			return checkMount(m)
		}
	}
	return nil
}

// checkMount asks the kernel for the state of a mounted filesystem.
func checkMount(m *mountinfo.Info) volumeFaults {
	// After the kernel stopped writing, the mount itself is still read-write.
	report, err := statfs(m.Mountpoint, slices.Contains(strings.Split(m.Options, ","), "ro"))
	if err != nil || !report.Condition.Abnormal {
		return nil // or it is being unmounted
	}
	kind := csi.VolumeHealthErrorType_DEGRADED
	if report.Condition.Reason == abi.ReasonShutDown {
		kind = csi.VolumeHealthErrorType_INACCESSIBLE
	}
	return volumeFault(kind, report.Condition.Reason, report.Condition.Message)
}

func statfs(path string, readOnly bool) (abi.StatsReply, error) {
	root, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return abi.StatsReply{}, err
	}
	defer func() { _ = unix.Close(root) }()
	return fsops.Stat(root, readOnly)
}

// checkStorage checks the filesystem that holds all images.
func checkStorage(images string) storageFaults {
	report, err := statfs(images, false)
	switch {
	case err != nil:
		return storageFault(csi.StorageHealthErrorType_STORAGE_UNREACHABLE, "PoolUnreachable", "the images cannot be seen: "+err.Error())
	case report.Condition.Reason == abi.ReasonShutDown:
		return storageFault(csi.StorageHealthErrorType_STORAGE_UNREACHABLE, report.Condition.Reason, report.Condition.Message)
	case report.Condition.Abnormal:
		return storageFault(csi.StorageHealthErrorType_STORAGE_DEGRADED, report.Condition.Reason, report.Condition.Message)
	case len(report.Usage) > 0 && report.Usage[0].Available < report.Usage[0].Total/100:
		return storageFault(csi.StorageHealthErrorType_STORAGE_DEGRADED, "PoolFull",
			"less than 1 % of the filesystem that holds the images is free: writes to volumes will fail")
	}
	return nil
}

func storageFault(kind csi.StorageHealthErrorType, reason, message string) storageFaults {
	return storageFaults{{Status: kind, Reason: reason, Message: message}}
}
