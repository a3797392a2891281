package staging

import "golang.org/x/sys/unix"

// statMount tells whether a path is the root of a mount, and of which filesystem.
func statMount(path string) (dev uint64, mounted bool) {
	var st unix.Statx_t
	const flags = unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT | unix.AT_STATX_DONT_SYNC
	if unix.Statx(unix.AT_FDCWD, path, flags, unix.STATX_BASIC_STATS, &st) != nil {
		return 0, false
	}
	return unix.Mkdev(st.Dev_major, st.Dev_minor), st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
}

// IsMountPoint reports whether a path is the root of a mount.
func IsMountPoint(path string) bool {
	_, mounted := statMount(path)
	return mounted
}

// DriverMounted tells whether a target shows what the driver has mounted at the
// staging path: a pod has the volume from a time when nobody stood before the
// driver, or whose records were lost.
func DriverMounted(staging, target string) bool {
	staged, mounted := statMount(staging)
	if !mounted {
		return false
	}
	shown, mounted := statMount(target)
	return mounted && shown == staged
}

// topMount is the id of the topmost mount at a path, or 0 where none is.
func topMount(path string) uint64 {
	var st unix.Statx_t
	const flags = unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT | unix.AT_STATX_DONT_SYNC
	if unix.Statx(unix.AT_FDCWD, path, flags, unix.STATX_MNT_ID, &st) != nil || st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return 0
	}
	return st.Mnt_id
}
