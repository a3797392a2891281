//go:build system

package containerd

import (
	"fmt"
	"testing"
)

// newKilledNode makes a node on which crust-runc dies at the failpoint that a file names,
// while the file is there.
func newKilledNode(t *testing.T) (r *testNode, where string) {
	t.Helper()
	where = t.TempDir() + "/where"
	return newWrappedNode(t, fmt.Sprintf("if [ -f %s ]; then CRUST_FAILPOINTS=$(cat %[1]s)=kill; export CRUST_FAILPOINTS; fi", where)), where
}
