package guard

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestPointsOfARootThatCannotBeOpened: only a root that does not exist has no guards.
func TestPointsOfARootThatCannotBeOpened(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "root")
	unknown := func(volume.Key) bool { return false }
	points, err := NewRoot(dir, "").Points(t.Context(), unknown)
	check.That(t, len(points) == 0 && err == nil, "no root: %v, %v", points, err)
	check.Must(t, os.Symlink(dir, dir))
	check.Fails(t, check.Err(NewRoot(dir, "").Points(t.Context(), unknown))) // or a root that cannot be opened is taken for one without guards
}

// TestLabelOfAGuard: a label that the kernel refuses, as it does each one without SELinux, is left out. Another option
// of the mount stands for one that it takes.
func TestLabelOfAGuard(t *testing.T) {
	check.NeedsRoot(t)
	for option, uid := range map[string]uint32{"uid": 7, "no-option": 0} {
		mount := check.Value(buildGuard("key", "", [2]string{option, "7"}))(t)
		var st unix.Stat_t
		err := unix.Fstat(mount, &st)
		ours := check.Value(isGuard(mount, "key"))(t)
		sys.CloseFD(mount)
		check.That(t, err == nil && ours && st.Uid == uid, "with %s: a guard is %v, of uid %d, %v", option, ours, st.Uid, err)
	}
}
