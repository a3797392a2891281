package mountopt

import (
	"slices"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Options lists the mount options of the volume that a kernel is to be given, one an
// element, and says "ro" exactly where the volume is read-only. Runtimes look for an
// element that is exactly "ro".
func Options(v *volume.Volume) []string {
	options := slices.DeleteFunc(Strip(Split(v.MountFlags)), func(option string) bool {
		return option == "ro" || option == "rw" && v.ReadOnly
	})
	if v.ReadOnly {
		options = append(options, "ro")
	}
	return options
}
