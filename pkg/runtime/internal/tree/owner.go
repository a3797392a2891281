package tree

import (
	"errors"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// markNames are the extended attributes that can mark our directories, the best first.
// trusted.* can be set by root only; user.* is for a daemon without privileges. Marker files
// are no alternative: readers would take one in the directory for a sandbox id, and one
// elsewhere would outlive the directory.
var markNames = []string{"trusted.crust-proxy", "user.crust-proxy"}

// chooseMark finds the attribute that the filesystem supports. It tries it on Temp itself: a
// start must succeed on a filesystem without a free inode.
func (t *Tree) chooseMark() (string, error) {
	var err error
	for _, name := range markNames {
		probe := name + "-probe"
		if err = unix.Lsetxattr(t.Temp, probe, []byte("probe"), 0); err == nil {
			_ = unix.Lremovexattr(t.Temp, probe)
			return name, nil
		}
	}
	return "", volume.Errorf(volume.Unsupported, "%s: the filesystem of %s takes no extended attributes, by which "+
		"our volumes are told from those of other programs: put it and %s on a tmpfs: %w", t.Name, t.Temp, t.Root, err)
}

// Owner is who published a volume's directory.
type Owner uint8

// The owners of a directory.
const (
	Missing   Owner = iota // there is no directory
	OwnedByUs              // it has our mark
	Foreign                // another program made it, or a crust-proxy of another kubelet root
)

// OwnerOf reads the mark of a volume's directory. key is the content of the mark.
func (t *Tree) OwnerOf(dir string) (Owner, volume.Key, error) {
	var buf [128]byte
	n, err := unix.Lgetxattr(t.Path(dir), t.mark, buf[:])
	switch {
	case err == nil && !t.isOfRoot(dir):
		return Foreign, "", nil
	case err == nil:
		return OwnedByUs, volume.Key(buf[:n]), nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return Missing, "", nil
	case errors.Is(err, unix.ENODATA), errors.Is(err, unix.ERANGE):
		return Foreign, "", nil
	default:
		return Missing, "", err
	}
}

// isOfRoot reports whether a marked directory was made for our kubelet root. If an older
// crust-proxy made it without that attribute, the target decides, if it is known.
func (t *Tree) isOfRoot(dir string) bool {
	if t.root == "" {
		return true
	}
	var buf [unix.PathMax]byte
	n, err := unix.Lgetxattr(t.Path(dir), t.mark+".root", buf[:])
	if err == nil {
		return string(buf[:n]) == t.root
	}
	if t.TargetOf == nil {
		return true
	}
	target, ok := t.TargetOf(dir)
	return !ok || t.IsOurs(target)
}

// IsOurs reports whether a target lies below our kubelet root, in either of its names.
func (t *Tree) IsOurs(target string) bool {
	_, resolved := sys.Below(t.root, target)
	_, asGiven := sys.Below(filepath.Clean(t.KubeletRoot), target)
	return t.root == "" || resolved || asGiven
}

func (t *Tree) sign(path string, key volume.Key) error {
	if err := unix.Lsetxattr(path, t.mark, []byte(key), 0); err != nil || t.root == "" {
		return err
	}
	return unix.Lsetxattr(path, t.mark+".root", []byte(t.root), 0)
}
