package kata

import (
	"errors"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// markNames are the extended attributes that may tell our directories from
// those of other writers, the best first. trusted.* can be set by root only;
// user.* serves a daemon without privileges. Nothing but an attribute will do:
// a marker file in the directory would be a sandbox id to Kata, one elsewhere
// would outlive the directory it speaks of.
var markNames = []string{"trusted.crust-proxy", "user.crust-proxy"}

// chooseMark finds the attribute that the filesystem takes.
func chooseMark(tempDir string) (string, error) {
	probe := filepath.Join(tempDir, "probe")
	if err := unix.Mkdir(probe, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return "", deferral.Errorf(kindOfErrno(err), "kata: cannot write to the temporary directory %s: %w", tempDir, err)
	}
	defer func() { _ = unix.Rmdir(probe) }()
	var err error
	for _, name := range markNames {
		if err = unix.Lsetxattr(probe, name, []byte("probe"), 0); err == nil {
			return name, nil
		}
	}
	return "", deferral.Errorf(deferral.Unsupported, "kata: the filesystem of %s takes no extended attributes, by which "+
		"our volumes are told from those of other programs: put it and the direct-volumes directory on a tmpfs: %w", tempDir, err)
}

// owner is who published a volume's directory.
type owner uint8

const (
	nobody   owner = iota // there is no directory
	us                    // it bears our mark
	stranger              // another program made it
)

// ownerOf reads the mark of a volume's directory; key is what it says.
func (h *Handler) ownerOf(dir string) (owner, deferral.Key, error) {
	var buf [128]byte
	n, err := unix.Lgetxattr(dir, h.mark, buf[:])
	switch {
	case err == nil:
		return us, deferral.Key(buf[:n]), nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return nobody, "", nil
	case errors.Is(err, unix.ENODATA), errors.Is(err, unix.ERANGE):
		return stranger, "", nil
	default:
		return nobody, "", err
	}
}
