package kata

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/projection"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// maxShared bounds a listing of a sandbox's shared directory, in which runtime-rs leaves a directory for each
// volume whenever a container starts. Tests change it.
var maxShared = 1 << 16

// sharedForm is the form of the names in a sandbox's shared directory: an id, some random hex
// digits, and the last element of a mount's path.
var sharedForm = regexp.MustCompile(`^([A-Za-z0-9_.]+)-([0-9a-f]+)-(.+)$`)

type sharedDir struct {
	name string
	born int64 // in nanoseconds
}

// listShared lists the directories in which the guest may have mounted devices, the newest
// first, without the dead ones. They are no mount points, as directories are that the host shares.
func (s *guestSearch) listShared() ([]sharedDir, error) {
	var found []sharedDir
	seen := make(map[string]bool)
	for _, mode := range []string{"rw", "ro"} {
		dir := s.passthrough(mode)
		names, err := projection.ReadNames(dir, maxShared+1)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if len(names) > maxShared {
			err = fmt.Errorf("it has more than %d entries, which Kata leaves there whenever a container starts: delete the pod", maxShared)
		}
		if err != nil {
			return nil, volume.Errorf(volume.Internal, "volume %s: what Kata sandbox %s shares with the host, in %s, "+
				"cannot be listed: %w", s.v.Target, s.shim.id, dir, err)
		}
		for _, name := range s.h.guests.withoutDead(s.v.Key, names) {
			if seen[name] || !sys.IsText(name) || !sharedForm.MatchString(name) {
				continue
			}
			if born, plain := plainDir(filepath.Join(dir, name)); plain {
				seen[name] = true
				found = append(found, sharedDir{name, born})
			}
		}
	}
	slices.SortFunc(found, func(a, b sharedDir) int {
		return cmp.Or(cmp.Compare(b.born, a.born), strings.Compare(a.name, b.name))
	})
	return found, nil
}

func (s *guestSearch) passthrough(mode string) string {
	return filepath.Join(s.h.cfg.SharedSandboxes, s.shim.id, mode, "passthrough")
}

// plainDir reports whether path is a directory and no mount point, and when it was made. If
// the filesystem does not record that, it is the time of the last change. It asks no server:
// that of another volume of the pod, which the host shares, may have gone.
func plainDir(path string) (born int64, plain bool) {
	var st unix.Statx_t
	const flags = unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT | unix.AT_STATX_DONT_SYNC
	if err := unix.Statx(unix.AT_FDCWD, path, flags, unix.STATX_TYPE|unix.STATX_BTIME|unix.STATX_MTIME, &st); err != nil {
		return 0, false
	}
	at := st.Mtime
	if st.Mask&unix.STATX_BTIME != 0 {
		at = st.Btime
	}
	return at.Sec*1e9 + int64(at.Nsec), st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0
}

func (s *guestSearch) ofVolume(ctx context.Context, dirs []sharedDir) ([]sharedDir, error) {
	if s.h.sandboxes == nil || len(dirs) == 0 {
		return dirs, nil
	}
	containers, err := s.h.sandboxes.ContainerIDs(ctx, s.shim.id)
	if err != nil {
		return nil, s.trackerError(ctx, err)
	}
	destinations, err := s.h.sandboxes.Destinations(ctx, s.shim.id, s.v.ResolvedTarget)
	if err != nil {
		return nil, s.trackerError(ctx, err)
	}
	containers = append(containers, s.shim.id)
	return slices.DeleteFunc(dirs, func(d sharedDir) bool {
		return ofContainer(d.name, containers) || !endsIn(d.name, destinations)
	}), nil
}

// ofContainer reports whether a name was made for a container's files: those begin with the
// container's id, or with its first ten characters.
func ofContainer(name string, containers []string) bool {
	head, _, _ := strings.Cut(name, "-")
	return slices.ContainsFunc(containers, func(id string) bool {
		return strings.HasPrefix(name, id) || head == id[:min(len(id), 10)]
	})
}

// endsIn reports whether a name was made for one of the mount destinations.
func endsIn(name string, destinations []string) bool {
	parts := sharedForm.FindStringSubmatch(name)
	return slices.ContainsFunc(destinations, func(destination string) bool {
		return parts[3] == path.Base(destination)
	})
}

func (s *guestSearch) trackerError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return contextError(s.v, s.shim.id, ctx.Err())
	}
	s.unknown = true
	return volume.Errorf(volume.NoSandbox, "volume %s: the container runtime cannot be asked about Kata sandbox %s, "+
		"so that the volume's place in the guest is not known: %w", s.v.Target, s.shim.id, err)
}

// guestMemory caches what was found out about volumes in guests of runtime-rs. Without it the guest is asked again.
type guestMemory struct {
	mu      sync.Mutex
	volumes map[volume.Key]guestVolume
}

type guestVolume struct {
	// path is where the sandbox's guest has the volume mounted, or "".
	sandbox, path string
	// empty are names of directories with nothing mounted, and since when: no time, if nothing will be mounted again.
	empty map[string]time.Time
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

// setPath remembers the path in a sandbox, or "" if the volume turned out not to be there.
func (m *guestMemory) setPath(key volume.Key, sandbox, path string) {
	m.update(key, func(g *guestVolume) { g.sandbox, g.path = sandbox, path })
}

func (m *guestMemory) update(key volume.Key, change func(*guestVolume)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	g := m.volumes[key]
	change(&g)
	m.volumes[key] = g
}

// markEmpty remembers a directory without a mount: for good, if it has been known for long enough.
func (m *guestMemory) markEmpty(key volume.Key, dir string) {
	m.update(key, func(g *guestVolume) {
		if g.empty == nil || len(g.empty) >= maxShared {
			g.empty = make(map[string]time.Time)
		}
		if since, known := g.empty[dir]; !known {
			g.empty[dir] = time.Now()
		} else if time.Since(since) >= settled {
			g.empty[dir] = time.Time{}
		}
	})
}

func (m *guestMemory) withoutDead(key volume.Key, names []string) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	empty := m.volumes[key].empty
	return slices.DeleteFunc(names, func(name string) bool {
		since, known := empty[name]
		return known && since.IsZero()
	})
}

// firstGroupless records that a sandbox ignores the volume's group, and reports whether that is new.
func (m *guestMemory) firstGroupless(key volume.Key, sandbox string) (first bool) {
	m.update(key, func(g *guestVolume) { first, g.groupless = g.groupless != sandbox, sandbox })
	return first
}
