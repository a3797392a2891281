package deferral

import (
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
)

// checkOptions refuses mount options that the sandboxes of a handler may not be given.
// Where this node's kernel makes the mount, only options are taken that are known to
// concern nothing but the filesystem.
func checkOptions(handler Projector, v *volume.Volume) error {
	check := mountopt.Check
	if abilitiesOf(handler).HostMounts {
		check = mountopt.CheckForHost
	}
	for _, option := range mountopt.Options(v) {
		if err := check(v.FSType, option); err != nil {
			return volume.Errorf(volume.Unsupported, "volume %s: %w", v.Target, err)
		}
	}
	return nil
}
