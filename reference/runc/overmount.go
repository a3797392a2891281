package runc

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// overmount puts a detached mount over a directory, for this mount namespace
// alone: the mount that the directory lies on is cut off from its peers first, or
// the host and every other namespace would get the volume too.
func overmount(mount, over int) error {
	if err := cutOff(over); err != nil {
		return fmt.Errorf("the place of the volume cannot be cut off from the host: %w", err)
	}
	if err := moveMount(mount, over); err != nil {
		return fmt.Errorf("the volume cannot be put in its place: %w", err)
	}
	return nil
}

func moveMount(mount, over int) error {
	return unix.MoveMount(mount, "", over, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// cutOff keeps the host and other namespaces from seeing what is mounted on the mount that
// a descriptor lies on, and believes only what the kernel says about it afterwards. A mount
// of which the descriptor is not the root can show more than the volume's place: it still
// follows the host, for containers with mountPropagation HostToContainer.
func cutOff(fd int) error {
	isRoot, err := isMounted(fd)
	if err != nil {
		return err
	}
	root, propagation := fd, uint64(unix.MS_PRIVATE)
	if !isRoot {
		if root, err = rootOfMount(fd); err != nil {
			return err
		}
		defer func() { _ = unix.Close(root) }()
		propagation = unix.MS_SLAVE
	}
	attr := unix.MountAttr{Propagation: propagation}
	if err := unix.MountSetattr(root, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return err
	}
	entry, err := mountEntry(fd)
	if err != nil {
		return err
	}
	if strings.Contains(entry.Optional, "shared:") {
		return fmt.Errorf("%s still shares its mounts (%s)", entry.Mountpoint, entry.Optional)
	}
	return nil
}

// rootOfMount opens the root of the mount that a descriptor lies on.
func rootOfMount(fd int) (int, error) {
	entry, err := mountEntry(fd)
	if err != nil {
		return -1, err
	}
	root, err := unix.Open(entry.Mountpoint, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	id, err := mountID(root)
	if err == nil && id != entry.ID {
		err = fmt.Errorf("something else is mounted over %s", entry.Mountpoint)
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(root))
	}
	return root, nil
}

func mountID(fd int) (int, error) {
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_MNT_ID, &st)
	return int(st.Mnt_id), err //nolint:gosec // the kernel's ids are ints
}

// mountEntry is the kernel's line about the mount that a descriptor lies on.
func mountEntry(fd int) (*mountinfo.Info, error) {
	id, err := mountID(fd)
	if err != nil {
		return nil, err
	}
	// This thread has a mount namespace of its own, which the process has not.
	file, err := os.Open("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	entries, err := mountinfo.GetMountsFromReader(file, func(m *mountinfo.Info) (skip, stop bool) {
		return m.ID != id, m.ID == id
	})
	if err != nil {
		return nil, err
	}
	if len(entries) != 1 {
		return nil, fmt.Errorf("the mount %d is not listed", id)
	}
	return entries[0], nil
}
