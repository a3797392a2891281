package runc

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
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

// withOurs adds to the options of a volume what its filesystem needs on a node that
// other pods share. A superblock can ask for a panic of the kernel at its first
// error, and a clone has the UUID of its original, beside which xfs refuses it.
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

// splitOptions divides the volume's options into those of the mount and those of
// the filesystem.
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

// mountDetached mounts the filesystem of a device nowhere: whoever has the
// descriptor has the mount, and with the last one it goes.
func mountDetached(info abi.Info) (int, error) {
	attrs, options, err := splitOptions(info.FSType, info.Options)
	if err != nil {
		return -1, err
	}
	fs, err := unix.Fsopen(info.FSType, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("the filesystem %s is not known to this node's kernel: load its module: %w", info.FSType, err)
	}
	defer func() { _ = unix.Close(fs) }()
	if err := unix.FsconfigSetString(fs, "source", info.Device); err != nil {
		return -1, fsError(fs, "the device "+info.Device+" is not taken", err)
	}
	for _, option := range options {
		if err := setOption(fs, option); err != nil {
			// The value can be a secret; its name is enough to find it.
			name, _, _ := strings.Cut(option, "=")
			return -1, fsError(fs, fmt.Sprintf("the mount option %q is not taken", name), err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		text := fmt.Sprintf("the filesystem on %s (%s) cannot be mounted", info.Device, info.FSType)
		if info.ReadOnly() && (errors.Is(err, unix.EROFS) || errors.Is(err, unix.EIO)) {
			text += " read-only: if its last user did not unmount it, it has to be mounted read-write once"
		}
		return -1, fsError(fs, text, err)
	}
	mount, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attrs|int(keptAttrs))
	if err != nil {
		return -1, fsError(fs, "the filesystem on "+info.Device+" cannot be mounted", err)
	}
	return mount, nil
}

func setOption(fs int, option string) error {
	name, value, given := strings.Cut(option, "=")
	if !given {
		return unix.FsconfigSetFlag(fs, name)
	}
	// kubelet quotes a label, because of the commas in it, for a mount command that
	// takes the quotes away.
	return unix.FsconfigSetString(fs, name, strings.Trim(value, `"`))
}

// fsError adds what the kernel says about the filesystem, which it tells through
// the descriptor of the attempt.
func fsError(fs int, text string, err error) error {
	var told []string
	buf := make([]byte, 512)
	for range 8 {
		n, readErr := unix.Read(fs, buf)
		if readErr != nil || n <= 2 {
			break
		}
		// A line begins with its kind: e, w or i.
		told = append(told, strings.TrimSpace(string(buf[2:n])))
	}
	if len(told) > 0 {
		text += " (" + strings.Join(told, "; ") + ")"
	}
	return fmt.Errorf("%s: %w", text, err)
}
