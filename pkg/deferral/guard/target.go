package guard

import (
	"errors"
	"path"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Root is the directory below which all targets lie.
type Root struct {
	// configured may be a symbolic link.
	configured string
	// notice is for a person who finds a guard. It ends with a line's end.
	notice string
	// resolved is what configured led to last: to ask /proc for each call would cost
	// more than the rest of the resolution.
	resolved atomic.Pointer[resolvedRoot]
}

// NewRoot makes a root. The directory need not exist yet. The notice says in each guard what that is.
func NewRoot(path, notice string) *Root { return &Root{configured: path, notice: notice} }

// resolvedRoot is the path of a directory, and what that directory is.
type resolvedRoot struct {
	dev, ino uint64
	path     string
}

const maxPath = 4095 // PATH_MAX less its NUL

// CheckPath accepts an absolute path of printable UTF-8 without "..". The field names the path in errors.
func CheckPath(field, p string) error {
	switch {
	case p == "":
		return volume.Errorf(volume.Invalid, "%s is empty: it is required", field)
	case len(p) > maxPath:
		return volume.Errorf(volume.Invalid, "%s is %d bytes long: more than the %d that a path may have", field, len(p), maxPath)
	case !utf8.ValidString(p):
		return volume.Errorf(volume.Invalid, "%s is not valid UTF-8", field)
	case !sys.IsText(p):
		return volume.Errorf(volume.Invalid, "%s %q holds control characters", field, sys.Clip(p))
	case !path.IsAbs(p):
		return volume.Errorf(volume.Invalid, "%s %q is not an absolute path", field, sys.Clip(p))
	}
	for part := range strings.SplitSeq(p, "/") {
		if part == ".." {
			return volume.Errorf(volume.Invalid, "%s %q climbs with \"..\": give the path it leads to", field, sys.Clip(p))
		}
		if len(part) > 255 {
			return volume.Errorf(volume.Invalid, "%s has a name of %d bytes: more than the 255 that a name may have", field, len(part))
		}
	}
	return nil
}

// Target is a resolved target path. No symbolic link is followed below the root, so the
// path can be resolved without touching the target.
type Target struct {
	// Given is the path as the caller wrote it, and Resolved the one without links.
	Given, Resolved string
	// Rel is the path below the root, and base its last element.
	Rel, base string
	// Key is that of the volume on this target.
	Key    volume.Key
	notice string
	root   int
	// Seen is the guard, once that was examined and found whole.
	Seen Seen
}

// Seen is a guard as it was when it was examined.
type Seen struct {
	stamp sys.Stamp
	at    time.Time
}

// examineEvery is how long that counts: neither what root changes within the notice nor a remount shows.
const examineEvery = 10 * time.Minute

// Stands reports whether the guard that was examined is still what is mounted on a path, unchanged.
func (s Seen) Stands(path string) bool {
	if s.at.IsZero() || time.Since(s.at) > examineEvery {
		return false
	}
	now, root, err := sys.StampAt(unix.AT_FDCWD, path)
	return err == nil && root && now == s.stamp
}

// Close closes the root that the target was resolved in.
func (t *Target) Close() { sys.CloseFD(t.root) }

// Resolve opens the root and names the target below it.
func (r *Root) Resolve(given string) (*Target, error) {
	if err := CheckPath("volume_target_path", given); err != nil {
		return nil, err
	}
	root, err := sys.OpenDir(r.configured)
	if err != nil {
		return nil, volume.Errorf(volume.Internal, "volume %s: the root directory %s cannot be opened: %w", given, r.configured, err)
	}
	rootPath, err := r.pathOf(root)
	if err != nil {
		sys.CloseFD(root)
		return nil, volume.Errorf(volume.Internal, "volume %s: the root directory %s cannot be resolved: %w", given, r.configured, err)
	}
	rel, ok := sys.Below(path.Clean(r.configured), path.Clean(given))
	if !ok {
		rel, ok = sys.Below(rootPath, path.Clean(given))
	}
	if !ok {
		sys.CloseFD(root)
		return nil, volume.Errorf(volume.Invalid, "volume_target_path %q does not lie below the root directory %s", sys.Clip(given), r.configured)
	}
	resolved := strings.TrimSuffix(rootPath, "/") + "/" + rel
	return &Target{Given: given, Resolved: resolved, Rel: rel, base: path.Base(rel), Key: volume.KeyOf(resolved), notice: r.notice, root: root}, nil
}

// pathOf resolves the opened root, again only if it is another directory.
func (r *Root) pathOf(root int) (string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(root, &st); err != nil {
		return "", err
	}
	if last := r.resolved.Load(); last != nil && last.dev == st.Dev && last.ino == st.Ino {
		return last.path, nil
	}
	found, err := sys.PathOfFD(root)
	if err == nil {
		r.resolved.Store(&resolvedRoot{dev: st.Dev, ino: st.Ino, path: found})
	}
	return found, err
}

// OpenParent opens the directory that holds the target.
func (t *Target) OpenParent() (int, error) {
	dir := path.Dir(t.Rel)
	fd, err := sys.OpenBeneath(t.root, dir, unix.O_PATH|unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return sys.NoFD, t.openError(path.Dir(t.Resolved), err)
	}
	return fd, nil
}

// openIn opens the target in its parent, or what is mounted on it. openError words its error.
func (t *Target) openIn(parent int) (int, error) {
	return sys.OpenBeneath(parent, t.base, unix.O_PATH|unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS)
}

func (t *Target) openError(where string, err error) error {
	switch {
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return volume.Errorf(volume.Denied, "volume %s: %s is reached through a symbolic link; "+
			"a target must be a plain path below the root directory: %w", t.Given, where, err)
	case errors.Is(err, unix.ENOENT):
		return volume.Errorf(volume.NotFound, "volume %s: %s does not exist: %w", t.Given, where, err)
	case errors.Is(err, unix.ENOTDIR):
		return volume.Errorf(volume.Invalid, "volume %s: %s is not a directory: %w", t.Given, where, err)
	default:
		return volume.Errorf(volume.Internal, "volume %s: cannot open %s: %w", t.Given, where, err)
	}
}

// Missing reports whether the target directory does not exist yet.
func (t *Target) Missing(parent int) (bool, error) {
	fd, err := t.openIn(parent)
	sys.CloseFD(fd)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return false, t.openError(t.Resolved, err)
	}
	return err != nil, nil
}

// removeDir removes the empty target directory, and reports whether it is gone.
// Anything in it, or mounted on it, is not ours.
func (t *Target) removeDir(parent int) (gone bool, err error) {
	err = unix.Unlinkat(parent, t.base, unix.AT_REMOVEDIR)
	switch {
	case err == nil, errors.Is(err, unix.ENOENT):
		return true, nil
	case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EBUSY), errors.Is(err, unix.ENOTDIR):
		return false, nil
	default:
		return false, volume.Errorf(volume.Internal, "volume %s: the target directory cannot be removed: %w", t.Given, err)
	}
}

func (t *Target) guardError(verb string, err error) error {
	kind, hint := volume.Internal, ""
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.ENOMEM):
		kind, hint = volume.Exhausted, " (is the node out of memory, or at fs.mount-max?)"
	case errors.Is(err, unix.ENOTTY), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EOPNOTSUPP):
		kind, hint = volume.Unsupported, " (a kernel of 6.0 or newer is needed)"
	}
	return volume.Errorf(kind, "volume %s: the guard of the target cannot be %s%s: %w", t.Given, verb, hint, err)
}
