package guard

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestPointsOfARootThatCannotBeOpened: only a root that does not exist has no guards.
func TestPointsOfARootThatCannotBeOpened(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "root")
	if points, err := NewRoot(dir, "").Points(t.Context()); len(points) != 0 || err != nil {
		t.Errorf("no root: %v, %v", points, err)
	}
	check.Must(t, os.Symlink(dir, dir))
	if _, err := NewRoot(dir, "").Points(t.Context()); err == nil {
		t.Error("a root that cannot be opened is taken for one without guards")
	}
}
