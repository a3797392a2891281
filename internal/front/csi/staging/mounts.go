package staging

import (
	"context"
	"errors"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// askNobody has no server asked for anything: the server of a mount may have gone.
const askNobody = unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT | unix.AT_STATX_DONT_SYNC

// MountAt describes what is at a path, and reports whether that is the root of a mount.
func MountAt(path string) (st unix.Statx_t, mounted bool) {
	err := unix.Statx(unix.AT_FDCWD, path, askNobody, unix.STATX_BASIC_STATS|unix.STATX_MNT_ID, &st)
	return st, err == nil && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
}

// IsUnpublished reports whether it is certain that a target shows no volume: nothing is there, or a directory or file on
// which nothing is mounted. A link, a device node, and what cannot be read may show one.
func IsUnpublished(target string) bool {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, target, askNobody, unix.STATX_BASIC_STATS, &st); err != nil {
		return errors.Is(err, unix.ENOENT)
	}
	kind := st.Mode & unix.S_IFMT
	return (kind == unix.S_IFDIR || kind == unix.S_IFREG) &&
		st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0 && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0
}

// MountedOnHost reports whether a filesystem is mounted at a target, and no guard: a pod has had the volume since before
// the front, or the records were lost.
func MountedOnHost(ctx context.Context, target string) (bool, error) {
	top, mounted := MountAt(target)
	if !mounted {
		return false, nil
	}
	id := strconv.FormatUint(top.Mnt_id, 10) + " "
	found, err := sys.Mounts(ctx, sys.MountTable, func(line string) bool { return strings.HasPrefix(line, id) })
	if err != nil {
		return false, volume.Errorf(volume.Busy, "whether a pod has the volume at %s cannot be told: %w", target, err)
	}
	return len(found) == 1 && found[0].FSType != "tmpfs", nil
}
