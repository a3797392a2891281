package kata

import (
	"context"
	"errors"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
)

const maxShared = 4096

// sharedForm is the name that runtime-rs gives to what it puts into a sandbox:
// an id, some random hex digits, and the last element of a mount's path.
var sharedForm = regexp.MustCompile(`^([A-Za-z0-9_.]+)-([0-9a-f]+)-(.+)$`)

// guestPath tells where the volume is mounted in a runtime-rs sandbox. Nobody
// records that; it is read from the directory that the runtime makes beside the
// sandbox for each volume. What stands there is for a guest to write, so that
// nothing but names of the right form is believed, and nothing is opened.
func (h *Handler) guestPath(ctx context.Context, v *deferral.Volume, id string) (string, error) {
	if b, guest, _ := h.current(v); b.id == id && guest != "" {
		return guest, nil
	}
	names, err := h.sharedDirs(v, id)
	if err != nil {
		return "", err
	}
	names, err = h.ofVolume(ctx, v, id, names)
	if err != nil {
		return "", err
	}
	name, err := onlyOne(v, id, names)
	if err != nil {
		return "", err
	}
	guest := strings.TrimSuffix(h.cfg.GuestShared, "/") + "/" + name
	h.setGuest(v, id, guest)
	return guest, nil
}

// forgetGuest tells whether there was a path to forget.
func (h *Handler) forgetGuest(v *deferral.Volume, id string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	e, ok := h.entries[v.Key]
	if !ok || e.live.id != id || e.guest == "" {
		return false
	}
	e.guest = ""
	return true
}

// sharedDirs lists the directories in which the guest may have mounted devices:
// plain ones, because a shared directory of the host is a mount point.
func (h *Handler) sharedDirs(v *deferral.Volume, id string) ([]string, error) {
	var found []string
	for _, mode := range []string{"rw", "ro"} {
		dir := filepath.Join(h.cfg.SharedSandboxes, id, mode, "passthrough")
		names, err := tree.ReadNames(dir, maxShared+1)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil || len(names) > maxShared {
			return nil, deferral.Errorf(deferral.Internal, "volume %s: what Kata sandbox %s shares with the host, in %s, "+
				"cannot be listed: %w", v.Target, id, dir, err)
		}
		for _, name := range names {
			if !slices.Contains(found, name) && isText(name) && isPlainDir(filepath.Join(dir, name)) {
				found = append(found, name)
			}
		}
	}
	slices.Sort(found)
	return found, nil
}

func isPlainDir(path string) bool {
	var st unix.Statx_t
	const flags = unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT
	if err := unix.Statx(unix.AT_FDCWD, path, flags, unix.STATX_TYPE, &st); err != nil {
		return false
	}
	return st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0
}

// ofVolume keeps the names that can be this volume's.
func (h *Handler) ofVolume(ctx context.Context, v *deferral.Volume, id string, names []string) ([]string, error) {
	names = slices.DeleteFunc(names, func(name string) bool { return !sharedForm.MatchString(name) })
	if h.sandboxes == nil {
		return names, nil
	}
	containers, err := h.sandboxes.ContainerIDs(ctx, id)
	if err != nil {
		return nil, h.trackerError(ctx, v, id, err)
	}
	names = slices.DeleteFunc(names, func(name string) bool { return ofContainer(name, append(containers, id)) })
	destinations, err := h.sandboxes.Destinations(ctx, id, v.ResolvedTarget)
	if err != nil {
		return nil, h.trackerError(ctx, v, id, err)
	}
	return slices.DeleteFunc(names, func(name string) bool { return !endsIn(name, destinations) }), nil
}

// ofContainer tells whether a name was made for a container's files: these
// begin with the container's id, or with the ten characters of it that
// runtime-rs keeps.
func ofContainer(name string, containers []string) bool {
	head, _, _ := strings.Cut(name, "-")
	for _, container := range containers {
		if container == "" {
			continue
		}
		if strings.HasPrefix(name, container) || head == guest.Clip(container, 10) {
			return true
		}
	}
	return false
}

// endsIn tells whether a name was made for one of the mount destinations.
func endsIn(name string, destinations []string) bool {
	parts := sharedForm.FindStringSubmatch(name)
	return slices.ContainsFunc(destinations, func(destination string) bool {
		return parts[3] == path.Base(destination)
	})
}

func (h *Handler) trackerError(ctx context.Context, v *deferral.Volume, id string, err error) error {
	if ctx.Err() != nil {
		return contextError(v, id, ctx.Err())
	}
	return deferral.Errorf(deferral.Internal, "volume %s: the container runtime cannot be asked about Kata sandbox %s, "+
		"so that the volume's place in the guest is not known: %w", v.Target, id, err)
}

// onlyOne refuses to guess. Several names of one device are not a guess: they
// are the same filesystem, mounted for several containers.
func onlyOne(v *deferral.Volume, id string, names []string) (string, error) {
	if len(names) == 0 {
		return "", deferral.Errorf(deferral.NoSandbox, "volume %s: Kata sandbox %s (%s) has not mounted it yet",
			v.Target, id, rustShim)
	}
	device, _, _ := strings.Cut(names[0], "-")
	for _, name := range names[1:] {
		if other, _, _ := strings.Cut(name, "-"); other != device {
			return "", deferral.Errorf(deferral.Unsupported, "volume %s: Kata sandbox %s (%s) has %d volumes that cannot be told "+
				"apart, because their mount paths in the containers end alike: give the volumeMounts' paths different last elements",
				v.Target, id, rustShim, len(names))
		}
	}
	return names[0], nil
}
