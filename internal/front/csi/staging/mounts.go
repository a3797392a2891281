package staging

import (
	"context"
	"errors"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// statAt asks no server for anything: the server of a mount may have gone.
func statAt(path string) (st unix.Statx_t, err error) {
	const flags = unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT | unix.AT_STATX_DONT_SYNC
	err = unix.Statx(unix.AT_FDCWD, path, flags, unix.STATX_BASIC_STATS|unix.STATX_MNT_ID, &st)
	return st, err
}

// mountAt describes the topmost mount whose root is at a path.
func mountAt(path string) (st unix.Statx_t, mounted bool) {
	st, err := statAt(path)
	return st, err == nil && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
}

// IsUnpublished reports whether it is certain that a target shows no volume: nothing is there, or a directory or file on
// which nothing is mounted. A link, a device node, and what cannot be read may show one.
func IsUnpublished(target string) bool {
	st, err := statAt(target)
	if err != nil {
		return errors.Is(err, unix.ENOENT)
	}
	kind := st.Mode & unix.S_IFMT
	return (kind == unix.S_IFDIR || kind == unix.S_IFREG) &&
		st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0 && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0
}

// IsMountPoint reports whether a path is the root of a mount.
func IsMountPoint(path string) bool {
	_, mounted := mountAt(path)
	return mounted
}

// MountedOnHost reports whether a filesystem is mounted at a target, and no guard: a pod has had the volume since before
// the front, or the records were lost.
func MountedOnHost(ctx context.Context, target string) bool {
	top := topMount(target)
	if top == 0 {
		return false
	}
	id := strconv.FormatUint(top, 10) + " "
	found, err := sys.Mounts(ctx, sys.MountTable, func(line string) bool { return strings.HasPrefix(line, id) })
	return err == nil && len(found) == 1 && found[0].FSType != "tmpfs"
}

// topMount is the id of the topmost mount at a path, or 0 where none is.
func topMount(path string) uint64 {
	if st, mounted := mountAt(path); mounted {
		return st.Mnt_id
	}
	return 0
}
