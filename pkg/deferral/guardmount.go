package deferral

import "golang.org/x/sys/unix"

// MountGuard mounts the guard of a volume on a directory, as the broker does when
// a volume is staged. It is for whoever tries a runtime handler without the broker.
func MountGuard(key Key, dir string) error {
	mount, err := buildGuard(key)
	if err != nil {
		return err
	}
	defer closeFD(mount)
	return unix.MoveMount(mount, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH)
}
