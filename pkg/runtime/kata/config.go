package kata

import (
	"context"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Config says where Kata's files are. Every path can be changed, so that several daemons can
// run side by side.
type Config struct {
	// DirectVolumes is Kata's root of direct-assigned volumes.
	DirectVolumes string
	// GoSandboxes and RustSandboxes hold one directory a sandbox, with the
	// management socket of its shim in it.
	GoSandboxes   string
	RustSandboxes string
	// SharedSandboxes is where runtime-rs keeps what a sandbox shares with the host.
	SharedSandboxes string
	// TempDir is where projections are built and taken apart. It must be on the
	// filesystem of DirectVolumes and outside it: Kata takes every file in there
	// for a sandbox id.
	TempDir string
	// KubeletRoot holds the targets of our volumes; others are another daemon's.
	KubeletRoot string
	// StateDir holds the record of which sandboxes had a volume. Nothing else may be in it.
	StateDir string
	// Filesystems are those that the guest's kernel can mount.
	Filesystems []string
	// OnChange is called after a volume's binding changed. It may be nil.
	OnChange func(volume.Key)
	// DeviceSize returns the size of a volume's device where it is known cheaply, to check
	// the guest's numbers. It may be nil.
	DeviceSize func(*volume.Volume) (int64, bool)
	// Matches reports whether the filesystem on the volume's device can have these totals
	// in statfs, and whether that is known. It may be nil.
	Matches func(ctx context.Context, v *volume.Volume, bytes, inodes int64) (matches, known bool)
	// Condition returns what the device says of the filesystem's health, or nil if that
	// is unknown. The function itself may be nil.
	Condition func(ctx context.Context, v *volume.Volume) *volume.Condition
	// LacksGroup reports whether the root directory of the volume's filesystem is not
	// known to be writable for the volume's group. It may be nil.
	LacksGroup func(ctx context.Context, v *volume.Volume) bool
}

func (c *Config) socketOf(id string, f flavor) string {
	root := c.GoSandboxes
	if f == rustShim {
		root = c.RustSandboxes
	}
	return root + "/" + id + "/shim-monitor.sock"
}
