package fsmount

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

// Ready mounts an open device nowhere, grown to its size. It gives files to the group of the pod until ctx is done. All
// that changes the filesystem is done before anybody can see it. The mount goes with its last descriptor.
func Ready(ctx context.Context, info abi.Info, device int, warn func(string)) (int, error) {
	mount, err := Mount(info, device, warn)
	if err != nil {
		return -1, err
	}
	if err := ApplyGroup(ctx, mount, info); err != nil {
		return -1, errors.Join(err, unix.Close(mount))
	}
	return mount, nil
}

// Mount is Ready without the group.
func Mount(info abi.Info, device int, warn func(string)) (int, error) {
	if err := fsops.OneDevice(device, info.FSType); err != nil {
		return -1, err
	}
	if err := fsops.Forget(sys.ProcFD(device), info.FSType); err != nil {
		return -1, err
	}
	mount, err := mountGrown(info, device, warn)
	if err != nil {
		return -1, err
	}
	// The kernel took the device by its name, and we by the descriptor.
	err = fsops.OnDevice(mount, device)
	if errors.Is(err, fsops.ErrElsewhere) {
		err = fmt.Errorf("another device took the name %s while it was mounted: try again", info.Device)
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(mount))
	}
	return mount, nil
}

// growTime bounds the check of a filesystem that is to grow and is not mounted.
const growTime = 90 * time.Second

// mountGrown mounts the device, and grows its filesystem to it. If that fails, the pod starts all the same.
func mountGrown(info abi.Info, device int, warn func(string)) (int, error) {
	mount, err := mountDetached(info)
	if err != nil || info.ReadOnly() {
		return mount, err
	}
	_, failed := fsops.Grow(mount, device, 0, 0)
	if errors.Is(failed, fsops.ErrDenied) && info.FSType == "ext4" {
		// Root without CAP_SYS_RESOURCE can grow an unmounted ext4, by its descriptor: the name may be another device's.
		sys.CloseFD(mount)
		ctx, cancel := context.WithTimeout(context.Background(), growTime)
		defer cancel()
		failed = fsops.GrowUnmounted(ctx, sys.ProcFD(device), info.FSType)
		mount, err = mountDetached(info)
	}
	if failed != nil {
		warn(fmt.Sprintf("volume %s: its filesystem is smaller than its device and does not grow: %v", info.Target(), failed))
	}
	return mount, err
}

// ApplyGroup gives the files of a volume to the group that the volume wants, if any.
func ApplyGroup(ctx context.Context, mount int, info abi.Info) error {
	gid, wanted, err := info.Group()
	if err != nil || !wanted || info.ReadOnly() {
		return err
	}
	if _, err := fsops.ApplyGroup(ctx, mount, gid, info.GroupPolicy()); err != nil {
		return fmt.Errorf("its files cannot be given to the group %d: %w", gid, err)
	}
	return nil
}
