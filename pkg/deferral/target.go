package deferral

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// targets resolves publish targets below the kubelet root.
type targets struct {
	// root is the kubelet root as configured; it may be a symbolic link.
	root string
	// resolved is what the root led to last. A look into /proc for each call
	// would cost more than all of the path's own resolution.
	resolved atomic.Pointer[resolvedRoot]
}

// resolvedRoot is the path of a directory, told by what the directory is.
type resolvedRoot struct {
	dev, ino uint64
	path     string
}

// target is a resolved target path. No symbolic link is followed below the
// kubelet root, so the resolved path can be told without touching the target.
type target struct {
	given    string
	resolved string
	rel      string // below the root
	root     int
}

func (t *target) close() { closeFD(t.root) }

// podUIDForm is generous: static pods have a hash for a UID.
var podUIDForm = lazily(`^[A-Za-z0-9][A-Za-z0-9-]{0,63}$`)

// resolve opens the kubelet root and names the target below it.
func (ts *targets) resolve(given string) (*target, error) {
	if err := checkPath("volume_target_path", given); err != nil {
		return nil, err
	}
	root, err := openDirPath(ts.root)
	if err != nil {
		return nil, Errorf(Internal, "volume %s: the kubelet root %s cannot be opened: %w", given, ts.root, err)
	}
	rootPath, err := ts.pathOf(root)
	if err != nil {
		closeFD(root)
		return nil, Errorf(Internal, "volume %s: the kubelet root %s cannot be resolved: %w", given, ts.root, err)
	}
	rel, ok := below(path.Clean(ts.root), path.Clean(given))
	if !ok {
		rel, ok = below(rootPath, path.Clean(given))
	}
	if !ok {
		closeFD(root)
		return nil, Errorf(Invalid, "volume_target_path %q does not lie below the kubelet root %s", clip(given), ts.root)
	}
	return &target{given: given, resolved: strings.TrimSuffix(rootPath, "/") + "/" + rel, rel: rel, root: root}, nil
}

// pathOf resolves the opened root, anew only where it is another directory.
func (ts *targets) pathOf(root int) (string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(root, &st); err != nil {
		return "", err
	}
	if last := ts.resolved.Load(); last != nil && last.dev == st.Dev && last.ino == st.Ino {
		return last.path, nil
	}
	found, err := pathOfFD(root)
	if err == nil {
		ts.resolved.Store(&resolvedRoot{dev: st.Dev, ino: st.Ino, path: found})
	}
	return found, err
}

// below gives the part of p under dir, by whole path components.
func below(dir, p string) (string, bool) {
	if dir == "/" {
		return strings.TrimPrefix(p, "/"), p != "/"
	}
	rest, ok := strings.CutPrefix(p, dir)
	if !ok || len(rest) < 2 || rest[0] != '/' {
		return "", false
	}
	return rest[1:], true
}

func (t *target) key() Key { return KeyOf(t.resolved) }

// podUID is the pod in kubelet's layout, pods/<uid>/volumes/..., or "".
func (t *target) podUID() string {
	parts := strings.SplitN(t.rel, "/", 4)
	if len(parts) < 3 || parts[0] != "pods" || parts[2] != "volumes" || !podUIDForm().MatchString(parts[1]) {
		return ""
	}
	return parts[1]
}

// openParent opens the directory that holds the target.
func (t *target) openParent() (int, error) {
	dir := path.Dir(t.rel)
	fd, err := openBeneath(t.root, dir, unix.O_PATH|unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return noFD, t.openError(path.Dir(t.resolved), err)
	}
	return fd, nil
}

// openIn opens the target in its parent; what is mounted there is what opens.
func (t *target) openIn(parent int) (int, error) {
	fd, err := openBeneath(parent, t.base(), unix.O_PATH|unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return noFD, t.openError(t.resolved, err)
	}
	return fd, nil
}

func (t *target) base() string { return path.Base(t.rel) }

func (t *target) openError(where string, err error) error {
	switch {
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return Errorf(Denied, "volume %s: %s is reached through a symbolic link; "+
			"a target must be a plain path below the kubelet root: %w", t.given, where, err)
	case errors.Is(err, unix.ENOENT):
		return Errorf(NotFound, "volume %s: %s does not exist: %w", t.given, where, err)
	case errors.Is(err, unix.ENOTDIR):
		return Errorf(Invalid, "volume %s: %s is not a directory: %w", t.given, where, err)
	default:
		return Errorf(Internal, "volume %s: cannot open %s: %w", t.given, where, err)
	}
}

// missing tells whether the target directory is yet to be made.
func (t *target) missing(parent int) (bool, error) {
	fd, err := t.openIn(parent)
	closeFD(fd)
	if err != nil && KindOf(err) == NotFound {
		return true, nil
	}
	return false, err
}

// make opens the target and makes its last directory where that is missing.
func (t *target) make(parent int) (int, error) {
	fd, err := t.openIn(parent)
	if err == nil || KindOf(err) != NotFound {
		return fd, err
	}
	if _, err := t.mkdir(parent); err != nil {
		return noFD, err
	}
	return t.openIn(parent)
}

// mkdir makes the target directory and tells whether it was made just now.
func (t *target) mkdir(parent int) (made bool, err error) {
	err = unix.Mkdirat(parent, t.base(), 0o750)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return false, Errorf(mkdirKind(err), "volume %s: cannot make the target directory: %w", t.given, err)
	}
	return err == nil, nil
}

func mkdirKind(err error) Kind {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return Exhausted
	}
	return Internal
}

var driverForm = lazily(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)

// driver reads the CSI driver's name from the vol_data.json that kubelet keeps
// beside each target. A target without one has no known driver.
func (t *target) driver(parent int) string {
	fd, err := unix.Openat(parent, "vol_data.json", unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	file := os.NewFile(uintptr(fd), "vol_data.json")
	defer func() { _ = file.Close() }()
	raw, err := io.ReadAll(io.LimitReader(file, 64<<10))
	if err != nil {
		return ""
	}
	var data struct {
		DriverName string `json:"driverName"`
	}
	if json.Unmarshal(raw, &data) != nil || !driverForm().MatchString(data.DriverName) {
		return ""
	}
	return data.DriverName
}
