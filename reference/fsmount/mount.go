// Package fsmount mounts the filesystems of volumes, by descriptors, and shows
// directories of them: what reference handlers share, whose kernel ever makes the mount.
package fsmount

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

// mountAttrs are the options that speak of a mount, and not of the filesystem.
var mountAttrs = map[string]struct{ set, clear int }{
	"nosuid":      {set: unix.MOUNT_ATTR_NOSUID},
	"suid":        {clear: unix.MOUNT_ATTR_NOSUID},
	"nodev":       {set: unix.MOUNT_ATTR_NODEV},
	"dev":         {clear: unix.MOUNT_ATTR_NODEV},
	"noexec":      {set: unix.MOUNT_ATTR_NOEXEC},
	"exec":        {clear: unix.MOUNT_ATTR_NOEXEC},
	"noatime":     {set: unix.MOUNT_ATTR_NOATIME, clear: unix.MOUNT_ATTR__ATIME},
	"strictatime": {set: unix.MOUNT_ATTR_STRICTATIME, clear: unix.MOUNT_ATTR__ATIME},
	"relatime":    {clear: unix.MOUNT_ATTR__ATIME},
	// Without another word the kernel's way is relatime.
	"norelatime":    {},
	"nostrictatime": {clear: unix.MOUNT_ATTR_STRICTATIME},
	"nodiratime":    {set: unix.MOUNT_ATTR_NODIRATIME},
	"diratime":      {clear: unix.MOUNT_ATTR_NODIRATIME},
	"nosymfollow":   {set: unix.MOUNT_ATTR_NOSYMFOLLOW},
	"symfollow":     {clear: unix.MOUNT_ATTR_NOSYMFOLLOW},
	"atime":         {clear: unix.MOUNT_ATTR__ATIME},
	"defaults":      {},
}

// withOurs adds to the options of a volume what its filesystem needs on a shared node. A superblock can ask for a panic
// of the kernel at its first error, and a clone has the UUID of its original, beside which xfs refuses it.
func withOurs(fsType string, options []string) []string {
	name, ours := "", ""
	switch fsType {
	case "ext2", "ext3", "ext4":
		name, ours = "errors", "errors=remount-ro"
	case "xfs":
		name, ours = "nouuid", "nouuid"
	}
	given := slices.ContainsFunc(options, func(option string) bool {
		given, _, _ := strings.Cut(option, "=")
		return given == name
	})
	if ours == "" || given {
		return options
	}
	return append(slices.Clone(options), ours)
}

// Attr tells whether an option speaks of a mount, and what it sets and clears there.
func Attr(option string) (sets, clears int, ofMount bool) {
	attr, ofMount := mountAttrs[option]
	return attr.set, attr.clear, ofMount
}

// Restrictions are the volume's options that take something away from a mount of it.
func Restrictions(info abi.Info) (options []string, err error) {
	attrs, _, err := splitOptions(info.FSType, info.Options)
	for _, option := range []string{"nosuid", "nodev", "noexec", "nosymfollow"} {
		if attrs&mountAttrs[option].set != 0 {
			options = append(options, option)
		}
	}
	return options, err
}

// splitOptions divides the volume's options into those of the mount and those of the filesystem.
func splitOptions(fsType string, options []string) (attrs int, rest []string, err error) {
	for _, option := range withOurs(fsType, mountopt.Strip(options)) {
		if err := mountopt.CheckForHost(fsType, option); err != nil {
			return 0, nil, err
		}
		attr, ofMount := mountAttrs[option]
		if !ofMount {
			rest = append(rest, option)
			continue
		}
		attrs = attrs&^attr.clear | attr.set
	}
	return attrs, rest, nil
}

// keptAttrs are the attributes of the mount that a sandbox keeps, whatever the volume's
// options are: only containers are to use what is in the volume, by mounts of their own.
const keptAttrs uint64 = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV

// mountDetached mounts the filesystem of a device nowhere.
func mountDetached(info abi.Info) (int, error) {
	attrs, options, err := splitOptions(info.FSType, info.Options)
	if err != nil {
		return -1, err
	}
	mount, err := fsops.NewMount(info.FSType, info.Device, options, attrs|int(keptAttrs))
	if info.ReadOnly() && (errors.Is(err, unix.EROFS) || errors.Is(err, unix.EIO)) {
		err = fmt.Errorf("read-only: if its last user did not unmount it, it has to be mounted read-write once, or with %s: %w",
			mountopt.NoReplay(info.FSType), err)
	}
	return mount, err
}

// Move moves a detached mount over a file or a directory.
func Move(mount, over int) error {
	return unix.MoveMount(mount, "", over, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// Clone gives a detached copy of a volume's mount at a directory of it, with the attributes that its options ask for.
func Clone(dir int, info abi.Info) (int, error) {
	attrs, _, err := splitOptions(info.FSType, info.Options)
	if err != nil {
		return -1, err
	}
	mount, err := unix.OpenTree(dir, "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("the sandbox's mount of the volume cannot be shared: %w", err)
	}
	asked := unix.MountAttr{Attr_set: keptAttrs & uint64(attrs), Attr_clr: keptAttrs &^ uint64(attrs)} //nolint:gosec // attributes are bits
	if err := unix.MountSetattr(mount, "", unix.AT_EMPTY_PATH, &asked); err != nil {
		return -1, errors.Join(fmt.Errorf("the volume's mount cannot be given its attributes: %w", err), unix.Close(mount))
	}
	return mount, nil
}
