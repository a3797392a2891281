package front

import "golang.org/x/sys/unix"

// mountOf tells whether a path is the root of a mount, and of which filesystem.
func mountOf(path string) (dev uint64, mounted bool) {
	var st unix.Statx_t
	const flags = unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT | unix.AT_STATX_DONT_SYNC
	if unix.Statx(unix.AT_FDCWD, path, flags, unix.STATX_BASIC_STATS, &st) != nil {
		return 0, false
	}
	return unix.Mkdev(st.Dev_major, st.Dev_minor), st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
}

// driverMounted tells whether a target shows what the driver has mounted at the
// staging path: a pod has the volume from a time when nobody stood before the
// driver, or whose records were lost.
func driverMounted(staging, target string) bool {
	staged, mounted := mountOf(staging)
	if !mounted {
		return false
	}
	shown, mounted := mountOf(target)
	return mounted && shown == staged
}
