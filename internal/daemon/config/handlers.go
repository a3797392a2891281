package config

import (
	"errors"
	"fmt"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Handlers are the runtime handlers.
type Handlers struct {
	// Default serves instructions that name no handler; by default Kata, if it is
	// enabled.
	Default string `json:"default"`
	Kata    Kata   `json:"kata"`
	Crust   Crust  `json:"crust"`
}

// Kata is the handler for both Kata runtimes.
type Kata struct {
	Enabled bool `json:"enabled"`
	// DirectVolumes is where Kata looks for mountInfo.json.
	DirectVolumes string `json:"directVolumes"`
	// GoSandboxes and RustSandboxes hold the sockets of the two shims.
	GoSandboxes   string `json:"goSandboxes"`
	RustSandboxes string `json:"rustSandboxes"`
	// SharedSandboxes holds the shared folders of runtime-rs.
	SharedSandboxes string `json:"sharedSandboxes"`
	// TempDir is where volumes are prepared, on the filesystem of DirectVolumes and
	// outside it; empty means the run directory, or a directory beside
	// DirectVolumes.
	TempDir string `json:"tempDir"`
	// Filesystems are those that the guest can mount.
	Filesystems []string `json:"filesystems"`
	// EndOrphans: a release ends a VMM whose sandbox the container runtime does not know any more.
	EndOrphans bool `json:"endOrphans"`
}

// Crust is the handler for runtimes that speak the directory ABI, such as
// crust-runc.
type Crust struct {
	Enabled bool `json:"enabled"`
	// Root is where these runtimes look for volumes.
	Root string `json:"root"`
	// TempDir is where volumes are prepared, on the filesystem of Root and
	// outside it; empty means the run directory, or a directory beside Root.
	TempDir string `json:"tempDir"`
	// Programs are the runtimes' programs that may be run.
	Programs []string `json:"programs"`
	// SocketDirs hold the sockets of runtimes that offer one.
	SocketDirs []string `json:"socketDirs"`
	// Filesystems are those that the runtimes can mount.
	Filesystems []string `json:"filesystems"`
}

// The names of the handlers.
const (
	kataName  = "kata"
	crustName = "crust"
)

func baseHandlers() Handlers {
	return Handlers{
		Kata: Kata{
			Enabled: true, DirectVolumes: "/run/kata-containers/shared/direct-volumes",
			GoSandboxes: "/run/vc/sbs", RustSandboxes: "/run/kata",
			SharedSandboxes: "/run/kata-containers/shared/sandboxes", Filesystems: []string{"ext4", "xfs", "btrfs"},
			EndOrphans: true,
		},
		Crust: Crust{
			Root: "/run/crust", Programs: []string{"/usr/bin/crust-runc"}, SocketDirs: []string{"/run/crust-runc"},
			Filesystems: []string{"ext4", "xfs", "btrfs"},
		},
	}
}

func (h *Handlers) complete() {
	if h.Default == "" && !h.Kata.Enabled && h.Crust.Enabled {
		h.Default = crustName
	}
	if h.Default == "" {
		h.Default = kataName
	}
}

func (h Handlers) names() []string {
	var names []string
	if h.Kata.Enabled {
		names = append(names, kataName)
	}
	if h.Crust.Enabled {
		names = append(names, crustName)
	}
	return names
}

func (h Handlers) validate() error {
	on := h.names()
	if len(on) == 0 {
		return errors.New("handlers.kata.enabled: no handler would be left: enable it, or handlers.crust")
	}
	return errors.Join(
		h.Kata.validate(),
		h.Crust.validate(),
		wrong(sys.Within(h.Kata.DirectVolumes, h.Crust.Root) || sys.Within(h.Crust.Root, h.Kata.DirectVolumes),
			"handlers.crust.root: %q and handlers.kata.directVolumes lie in each other", h.Crust.Root),
		oneOf("handlers.default", h.Default, on...))
}

func (k Kata) validate() error {
	const key = "handlers.kata."
	return errors.Join(
		absolute(key+"directVolumes", k.DirectVolumes),
		absolute(key+"goSandboxes", k.GoSandboxes),
		absolute(key+"rustSandboxes", k.RustSandboxes),
		absolute(key+"sharedSandboxes", k.SharedSandboxes),
		filesystems(key+"filesystems", k.Filesystems),
		absoluteOrEmpty(key+"tempDir", k.TempDir),
		// Kata takes every name in its tree for a volume or sandbox.
		wrong(sys.Within(k.DirectVolumes, k.TempDir),
			key+"tempDir: %q lies in directVolumes, where Kata takes every file for a sandbox", k.TempDir))
}

func (c Crust) validate() error {
	const key = "handlers.crust."
	return errors.Join(
		absolute(key+"root", c.Root),
		absoluteAll(key+"programs", c.Programs),
		absoluteAll(key+"socketDirs", c.SocketDirs),
		filesystems(key+"filesystems", c.Filesystems),
		absoluteOrEmpty(key+"tempDir", c.TempDir),
		wrong(sys.Within(c.Root, c.TempDir), key+"tempDir: %q lies in root, where runtimes look for volumes", c.TempDir),
		wrong(len(c.Programs)+len(c.SocketDirs) == 0,
			key+"programs: no sandbox could ever be asked: name programs, or socketDirs"))
}

func filesystems(key string, names []string) error {
	err := wrong(len(names) == 0, "%s: no volume could ever be deferred", key)
	for i, fs := range names {
		err = errors.Join(err, filesystem(fmt.Sprintf("%s[%d]", key, i), fs))
	}
	return err
}

func filesystem(key, name string) error {
	return wrong(!volume.IsFSType(name), "%s: %q is not a filesystem's name", key, name)
}
