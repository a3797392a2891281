package guard

import (
	"os"
	"path/filepath"
	"testing"

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
