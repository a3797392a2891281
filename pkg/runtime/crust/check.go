package crust

import (
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
)

// hostOptions are mount options that speak of mounts, not of a filesystem: the
// handler makes the mount, and how is its own affair.
var hostOptions = []string{
	"bind", "rbind", "move", "remount", "loop",
	"shared", "rshared", "slave", "rslave", "private", "rprivate", "unbindable", "runbindable",
}

// Check tells why no handler could serve the volume.
func (h *Handler) Check(v *deferral.Volume) error {
	if !isText(v.ResolvedTarget) || !strings.HasPrefix(v.ResolvedTarget, "/") {
		return deferral.Errorf(deferral.Invalid, "volume %q: the target is not an absolute path of printable text", v.Target)
	}
	if v.Device.Kind == deferral.ImageFile {
		return deferral.Errorf(deferral.Unsupported, "volume %s: %s is an image file, and crust-runc mounts block devices: "+
			"attach it to a loop device and hand that over", v.Target, v.Device.Path)
	}
	if v.Device.Kind != deferral.BlockDevice || v.Device.Path == "" {
		return deferral.Errorf(deferral.Invalid, "volume %s: it has no block device, and crust-runc mounts nothing else", v.Target)
	}
	if !slices.Contains(h.cfg.Filesystems, v.FSType) {
		return deferral.Errorf(deferral.Unsupported, "volume %s: the filesystem %q is not among those that crust-runc "+
			"may mount (%s): use one of these, or add it to handlers.crust.filesystems",
			v.Target, v.FSType, strings.Join(h.cfg.Filesystems, ", "))
	}
	if err := checkOptions(v); err != nil {
		return err
	}
	return checkGroup(v)
}

func isText(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}

func checkOptions(v *deferral.Volume) error {
	for _, option := range v.Options() {
		name, _, _ := strings.Cut(option, "=")
		if slices.Contains(hostOptions, name) {
			return deferral.Errorf(deferral.Unsupported, "volume %s: the mount option %q cannot work with crust-runc, "+
				"which mounts the device by itself: remove it from the volume's mount options", v.Target, name)
		}
	}
	return nil
}

// checkGroup takes group 0 too: chown does. The highest number means to chown that
// the group stays as it is.
func checkGroup(v *deferral.Volume) error {
	if v.Group == "" {
		if v.GroupPolicy != deferral.GroupPolicyUnset {
			return deferral.Errorf(deferral.Invalid, "volume %s: a group change policy needs a group", v.Target)
		}
		return nil
	}
	gid, err := strconv.ParseUint(v.Group, 10, 32)
	if err != nil || strconv.FormatUint(gid, 10) != v.Group || gid == 1<<32-1 {
		return deferral.Errorf(deferral.Invalid, "volume %s: the group %q is not a decimal group id", v.Target, guest.Clip(v.Group, 64))
	}
	return nil
}
