package kata

import (
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// Config says where Kata keeps its things. Default gives Kata's own places;
// every one can be moved, so that several daemons can run side by side.
type Config struct {
	// DirectVolumes is Kata's root of direct-assigned volumes.
	DirectVolumes string
	// GoSandboxes and RustSandboxes hold one directory a sandbox, with the
	// management socket of its shim in it.
	GoSandboxes   string
	RustSandboxes string
	// SharedSandboxes is where runtime-rs keeps what a sandbox shares with the
	// host; GuestShared is the same place as the guest sees it.
	SharedSandboxes string
	GuestShared     string
	// TempDir is where projections are built and taken apart. It must be on the
	// filesystem of DirectVolumes and outside it: Kata takes every file in there
	// for a sandbox id.
	TempDir string
	// Filesystems are those that the guest's kernel can mount.
	Filesystems []string
	// OnChange is called after a volume's binding changed. It may be nil.
	OnChange func(deferral.Key)
	// DeviceSize tells the size of a volume's device where it is known cheaply,
	// to check what a guest says. It may be nil.
	DeviceSize func(*deferral.Volume) (int64, bool)
}

// Default is a stock Kata installation.
func Default() Config {
	return Config{
		DirectVolumes:   "/run/kata-containers/shared/direct-volumes",
		GoSandboxes:     "/run/vc/sbs",
		RustSandboxes:   "/run/kata",
		SharedSandboxes: "/run/kata-containers/shared/sandboxes",
		GuestShared:     "/run/kata-containers/shared/containers/passthrough/",
		TempDir:         "/run/crust-proxy/tmp/kata",
		Filesystems:     []string{"ext4", "xfs", "btrfs"},
	}
}
