package oci

import (
	"context"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// guard is a guard mount, or a bind mount of a part of one.
type guard struct {
	volume string // the key of the volume that it stands for
	sub    string // the sub-directory, "" for all of it
	point  string // where it is mounted
	gone   bool   // the sub-directory was removed under the mount
}

// guards are the guard mounts of a mount namespace, by the id of the mount.
type guards map[int]guard

// deleted is what the kernel appends to the root of a mount whose directory was
// removed.
const deleted = "//deleted"

// readGuards reads them from a mount table.
func readGuards(table string) (guards, error) {
	mounts, err := sys.Mounts(context.Background(), table, func(line string) bool { return strings.Contains(line, " "+abi.GuardPrefix) })
	if err != nil {
		return nil, err
	}
	found := make(guards)
	for _, m := range mounts {
		volume, ok := strings.CutPrefix(m.Source, abi.GuardPrefix)
		if !ok || m.FSType != "tmpfs" || !abi.IsDirName(volume) {
			continue
		}
		sub, gone := strings.CutSuffix(m.Root, deleted)
		found[m.ID] = guard{volume: volume, sub: strings.Trim(sub, "/"), point: m.Mountpoint, gone: gone}
	}
	return found, nil
}

// mountOf returns the id of the mount that a descriptor lies on, and whether it is the root
// of that. It does not wait for a network filesystem that hangs.
func mountOf(fd int) (id int, isRoot bool, err error) {
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_MNT_ID, &st); err != nil {
		return 0, false, err
	}
	return int(st.Mnt_id), st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil //nolint:gosec // the kernel's ids are ints
}
