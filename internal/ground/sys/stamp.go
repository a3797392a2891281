package sys

import (
	"time"

	"golang.org/x/sys/unix"
)

// Stamp tells a file or directory from another one, and from what it was before a change of its content, names or
// attributes.
type Stamp struct {
	mount, device, inode uint64
	changed              int64 // in nanoseconds
}

// StampAt returns the stamp of a path, or of the directory itself for "", and whether a mount begins there. It follows
// no link, and asks no server.
func StampAt(dir int, path string) (stamp Stamp, mountRoot bool, err error) {
	var st unix.Statx_t
	const flags = unix.AT_SYMLINK_NOFOLLOW | unix.AT_EMPTY_PATH | unix.AT_STATX_DONT_SYNC
	if err := unix.Statx(dir, path, flags, unix.STATX_MNT_ID|unix.STATX_INO|unix.STATX_CTIME, &st); err != nil {
		return Stamp{}, false, err
	}
	stamp = Stamp{
		mount: st.Mnt_id, device: unix.Mkdev(st.Dev_major, st.Dev_minor), inode: st.Ino,
		changed: st.Ctime.Sec*int64(time.Second) + int64(st.Ctime.Nsec),
	}
	return stamp, st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

// Settled reports whether a change from now on would show: the clock of the kernel's times is coarse.
func (s Stamp) Settled() bool { return s.changed < time.Now().Add(-time.Second).UnixNano() }
