package crust

import (
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Config says where volumes are published to runtime handlers of the directory ABI, and which
// programs and sockets of theirs are trusted.
type Config struct {
	// Root holds one directory a volume.
	Root string
	// TempDir is where projections are built: on the filesystem of Root and outside it.
	TempDir string
	// KubeletRoot holds the targets of our volumes; others are another daemon's.
	KubeletRoot string
	// Programs are the absolute paths of the only programs that are run.
	Programs []string
	// SocketDirs are the directories below which a handler's socket may lie.
	SocketDirs []string
	// Owner is the user who must own programs and sockets, and serve the sockets: 0 except
	// in tests.
	Owner uint32
	// Filesystems are those that the handlers can mount.
	Filesystems []string
	// SELinux is set where mount options such as context= mean something to the kernel.
	SELinux bool
	// OnChange is called after a volume's binding changed. It may be nil.
	OnChange func(volume.Key)
	// DeviceSize returns the size of a volume's device where it is known cheaply, to check
	// a handler's numbers. It may be nil.
	DeviceSize func(*volume.Volume) (int64, bool)
}
