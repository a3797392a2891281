package confine

import (
	"errors"
	"io/fs"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	read = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	run  = read | unix.LANDLOCK_ACCESS_FS_EXECUTE
	// change is the access to the device. Kernels know the right to use ioctl on it from Landlock's version 5 on.
	change = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	// ofFiles are the rights that a rule for a file may have.
	ofFiles = unix.LANDLOCK_ACCESS_FS_EXECUTE | change | unix.LANDLOCK_ACCESS_FS_TRUNCATE
)

// accessible are the files that programs may use, as far as they exist.
var accessible = map[string]uint64{
	"/usr": run, "/bin": run, "/sbin": run, "/lib": run, "/lib32": run, "/lib64": run,
	"/etc/ld.so.cache": read, "/etc/mke2fs.conf": read, "/etc/e2fsck.conf": read, "/etc/blkid.conf": read,
	"/proc": read, "/sys": read, "/dev/null": change,
}

// restrictFiles allows this thread and its children only the accessible files, the directory programs, and the device.
func restrictFiles(device *os.File, programs string) error {
	version, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno == unix.ENOSYS || errno == unix.EOPNOTSUPP || errno == unix.EPERM {
		return nil // a kernel without it, or a container that may not use it
	}
	if errno != 0 {
		return errno
	}
	// The kernel accepts fields that it does not know if they are zero.
	handled := unix.LandlockRulesetAttr{Handled_access_fs: handledBy(int(version))}
	if version >= 4 {
		handled.Handled_access_net = unix.LANDLOCK_ACCESS_NET_BIND_TCP | unix.LANDLOCK_ACCESS_NET_CONNECT_TCP
	}
	if version >= 6 {
		handled.Scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET
	}
	if version >= 7 { // that of version 6 may keep Go's scheduler from signals to our own threads
		handled.Scoped |= unix.LANDLOCK_SCOPE_SIGNAL
	}
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&handled)), unsafe.Sizeof(handled), 0) //nolint:gosec // how the call takes it
	if errno != 0 {
		return errno
	}
	rules := ruleset{fd: int(fd), handled: handled.Handled_access_fs}
	defer func() { _ = unix.Close(rules.fd) }()
	err := errors.Join(rules.allow(int(device.Fd()), change), rules.allowPath(programs, run))
	for path, access := range accessible {
		err = errors.Join(err, rules.allowPath(path, access))
	}
	if err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// handledBy returns all rights on files that a version of Landlock can deny.
func handledBy(version int) uint64 {
	rights := uint64(unix.LANDLOCK_ACCESS_FS_MAKE_SYM<<1 - 1)
	for right, since := range map[uint64]int{
		unix.LANDLOCK_ACCESS_FS_REFER: 2, unix.LANDLOCK_ACCESS_FS_TRUNCATE: 3, unix.LANDLOCK_ACCESS_FS_IOCTL_DEV: 5,
	} {
		if version >= since {
			rights |= right
		}
	}
	return rights
}

type ruleset struct {
	fd      int
	handled uint64
}

func (r ruleset) allowPath(path string, access uint64) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	return r.allow(fd, access)
}

func (r ruleset) allow(fd int, access uint64) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		access &= ofFiles
	}
	rule := unix.LandlockPathBeneathAttr{Allowed_access: access & r.handled, Parent_fd: int32(fd)}                                                    //nolint:gosec // descriptors are small
	_, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(r.fd), unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&rule)), 0, 0, 0) //nolint:gosec // how the call takes it
	if errno != 0 {
		return errno
	}
	return nil
}
