package projection

import (
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// CheckGroup checks the volume's group and its policy. The group must be a decimal number,
// and not larger than most.
func CheckGroup(v *volume.Volume, most uint32) (gid uint32, set bool, err error) {
	if v.Group == "" {
		if v.GroupPolicy != volume.GroupPolicyUnset {
			err = volume.Errorf(volume.Invalid, "volume %s: a group change policy needs a group", v.Target)
		}
		return 0, false, err
	}
	n, err := strconv.ParseUint(v.Group, 10, 32)
	// Kata reads a number with a leading zero as octal: 010 would be 8.
	if err != nil || strconv.FormatUint(n, 10) != v.Group || n > uint64(most) {
		return 0, false, volume.Errorf(volume.Invalid, "volume %s: the group %q is not a decimal group id", v.Target, sys.ClipTo(v.Group, 64))
	}
	return uint32(n), true, nil
}

// Describe sets the fields of v that a valid mountInfo.json has, and when the file was made.
func Describe(v *volume.Volume, info abi.Info, file string) {
	v.FSType, v.MountFlags, v.ReadOnly = info.FSType, slices.Clone(info.Options), info.ReadOnly()
	v.Group, v.GroupPolicy = info.Metadata[abi.MetaGroup], info.GroupPolicy()
	if st, err := os.Lstat(file); err == nil {
		v.Created = st.ModTime().Round(time.Microsecond)
	}
}

// Pods returns the pod of a sandbox, if that is known.
type Pods interface {
	PodOf(sandboxID string) (podUID string, known bool)
}

// OfOtherPod reports whether a sandbox is known to be of another pod than the volume's. pods is
// nil if no container runtime is followed.
func OfOtherPod(pods Pods, sandbox, podUID string) bool {
	if pods == nil || podUID == "" {
		return false
	}
	pod, known := pods.PodOf(sandbox)
	return known && pod != podUID
}
