package tree

import (
	"errors"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// markNames are the extended attributes that may tell our directories from
// those of other writers, the best first. trusted.* can be set by root only;
// user.* serves a daemon without privileges. Nothing but an attribute will do:
// a marker file in the directory would be a sandbox id to its readers, one elsewhere
// would outlive the directory it speaks of.
var markNames = []string{"trusted.crust-proxy", "user.crust-proxy"}

// chooseMark finds the attribute that the filesystem takes.
func (t *Tree) chooseMark() (string, error) {
	probe := filepath.Join(t.Temp, "probe")
	if err := unix.Mkdir(probe, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return "", deferral.Errorf(KindOf(err), "%s: cannot write to the temporary directory %s: %w", t.Name, t.Temp, err)
	}
	defer func() { _ = unix.Rmdir(probe) }()
	var err error
	for _, name := range markNames {
		if err = unix.Lsetxattr(probe, name, []byte("probe"), 0); err == nil {
			return name, nil
		}
	}
	return "", deferral.Errorf(deferral.Unsupported, "%s: the filesystem of %s takes no extended attributes, by which "+
		"our volumes are told from those of other programs: put it and %s on a tmpfs: %w", t.Name, t.Temp, t.Root, err)
}

// Owner is who published a volume's directory.
type Owner uint8

// The owners of a directory.
const (
	Nobody   Owner = iota // there is no directory
	Us                    // it bears our mark
	Stranger              // another program made it
)

// OwnerOf reads the mark of a volume's directory; key is what it says.
func (t *Tree) OwnerOf(dir string) (Owner, deferral.Key, error) {
	var buf [128]byte
	n, err := unix.Lgetxattr(t.Path(dir), t.mark, buf[:])
	switch {
	case err == nil:
		return Us, deferral.Key(buf[:n]), nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return Nobody, "", nil
	case errors.Is(err, unix.ENODATA), errors.Is(err, unix.ERANGE):
		return Stranger, "", nil
	default:
		return Nobody, "", err
	}
}
