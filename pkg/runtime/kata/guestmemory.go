package kata

import (
	"slices"
	"sync"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// guestMemory caches what was found out about volumes in guests of runtime-rs. Without it
// the guest is asked again.
type guestMemory struct {
	mu      sync.Mutex
	volumes map[volume.Key]guestVolume
}

type guestVolume struct {
	// path is where the sandbox's guest has the volume mounted, or "".
	sandbox, path string
	// dead are names of directories in which nothing will be mounted again.
	dead map[string]bool
	// groupless is the sandbox that was logged to ignore the volume's group.
	groupless string
}

func (m *guestMemory) drop(key volume.Key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.volumes, key)
}

func (m *guestMemory) path(key volume.Key, sandbox string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if g := m.volumes[key]; g.sandbox == sandbox {
		return g.path
	}
	return ""
}

func (m *guestMemory) setPath(key volume.Key, sandbox, path string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	g := m.volumes[key]
	g.sandbox, g.path = sandbox, path
	m.volumes[key] = g
}

// forgetPath forgets a path at which the volume turned out not to be mounted.
func (m *guestMemory) forgetPath(key volume.Key, sandbox, path string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if g, ok := m.volumes[key]; ok && g.sandbox == sandbox && g.path == path {
		g.path = ""
		m.volumes[key] = g
	}
}

// markDead remembers a directory in which nothing will be mounted again.
func (m *guestMemory) markDead(key volume.Key, dir string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	g := m.volumes[key]
	if g.dead == nil {
		g.dead = make(map[string]bool)
		m.volumes[key] = g
	}
	if len(g.dead) < maxShared {
		g.dead[dir] = true
	}
}

// withoutDead removes the dead directories from dirs, and forgets those that are not in it.
func (m *guestMemory) withoutDead(key volume.Key, dirs []sharedDir) []sharedDir {
	m.mu.Lock()
	defer m.mu.Unlock()
	g, ok := m.volumes[key]
	if !ok {
		return dirs
	}
	still := make(map[string]bool, len(g.dead))
	dirs = slices.DeleteFunc(dirs, func(d sharedDir) bool {
		if g.dead[d.name] {
			still[d.name] = true
		}
		return g.dead[d.name]
	})
	g.dead = still
	m.volumes[key] = g
	return dirs
}

// firstGroupless records that a sandbox ignores the volume's group, and reports whether that
// is new.
func (m *guestMemory) firstGroupless(key volume.Key, sandbox string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	g := m.volumes[key]
	first := g.groupless != sandbox
	g.groupless = sandbox
	m.volumes[key] = g
	return first
}
