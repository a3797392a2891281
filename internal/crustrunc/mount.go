package crustrunc

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
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
	"nodiratime":  {set: unix.MOUNT_ATTR_NODIRATIME},
	"diratime":    {clear: unix.MOUNT_ATTR_NODIRATIME},
	"nosymfollow": {set: unix.MOUNT_ATTR_NOSYMFOLLOW},
	"symfollow":   {clear: unix.MOUNT_ATTR_NOSYMFOLLOW},
	"atime":       {clear: unix.MOUNT_ATTR__ATIME},
	"defaults":    {},
}

// hostOptions speak of binds and of propagation: a device is mounted by itself.
var hostOptions = []string{
	"bind", "rbind", "move", "remount", "loop",
	"shared", "rshared", "slave", "rslave", "private", "rprivate", "unbindable", "runbindable",
}

// splitOptions divides the volume's options into those of the mount and those of
// the filesystem.
func splitOptions(options []string) (attrs int, rest []string, err error) {
	for _, option := range options {
		if slices.Contains(hostOptions, option) {
			return 0, nil, fmt.Errorf("the mount option %q cannot work for a device", option)
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

// mountDetached mounts the filesystem of a device nowhere: whoever has the
// descriptor has the mount, and with the last one it goes.
func mountDetached(info abi.Info) (int, error) {
	attrs, options, err := splitOptions(info.Options)
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
	mount, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attrs)
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
