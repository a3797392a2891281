package kata

import (
	"slices"
	"strconv"
	"strings"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
)

// hostOptions are mount options that speak of mounts, not of a filesystem. Kata
// hands options to the guest's mount call as they are, and a bind among them
// makes it bind an empty directory.
var hostOptions = []string{
	"bind", "rbind", "move", "remount", "loop",
	"shared", "rshared", "slave", "rslave", "private", "rprivate", "unbindable", "runbindable",
}

// Check tells why Kata could not serve the volume.
func (h *Handler) Check(v *deferral.Volume) error {
	if !hasName(v) {
		return deferral.Errorf(deferral.Invalid, "volume %s: the target path has %d bytes and Kata can name volumes "+
			"of at most %d: use a shorter kubelet root directory, driver name or volume name",
			v.Target, len(v.Target), maxTarget)
	}
	if !isText(v.Target) || !strings.HasPrefix(v.Target, "/") {
		return deferral.Errorf(deferral.Invalid, "volume %q: the target is not an absolute path of printable text", v.Target)
	}
	if v.Device.Path == "" {
		return deferral.Errorf(deferral.Invalid, "volume %s: it has no device, and Kata mounts only block devices and disk images", v.Target)
	}
	if !slices.Contains(h.cfg.Filesystems, v.FSType) {
		return deferral.Errorf(deferral.Unsupported, "volume %s: the filesystem %q is not among those that Kata's guest "+
			"may mount (%s): use one of these, or add it to the handler's configuration",
			v.Target, v.FSType, strings.Join(h.cfg.Filesystems, ", "))
	}
	if err := checkOptions(v); err != nil {
		return err
	}
	return checkGroup(v)
}

func checkOptions(v *deferral.Volume) error {
	for _, flag := range v.MountFlags {
		for _, option := range deferral.SplitOptions(flag) {
			name, _, _ := strings.Cut(strings.TrimSpace(option), "=")
			if slices.Contains(hostOptions, name) {
				return deferral.Errorf(deferral.Unsupported, "volume %s: the mount option %q cannot work in a Kata sandbox, "+
					"which mounts the device by itself: remove it from the volume's mount options", v.Target, name)
			}
		}
	}
	return nil
}

func checkGroup(v *deferral.Volume) error {
	if v.Group == "" {
		if v.GroupPolicy != deferral.GroupPolicyUnset {
			return deferral.Errorf(deferral.Invalid, "volume %s: a group change policy needs a group", v.Target)
		}
		return nil
	}
	gid, err := strconv.ParseUint(v.Group, 10, 32)
	// Kata reads the number with its base taken from its form: 010 would be 8.
	if err != nil || strconv.FormatUint(gid, 10) != v.Group {
		return deferral.Errorf(deferral.Invalid, "volume %s: the group %q is not a decimal group id", v.Target, guest.Clip(v.Group, 64))
	}
	if gid == 0 {
		return deferral.Errorf(deferral.Unsupported, "volume %s: Kata cannot apply the group 0: "+
			"leave fsGroup out, or give a group above 0", v.Target)
	}
	return nil
}
