package blocks

import (
	"path/filepath"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestNoKubeconfigSaysWhatToGive: client-go's words name a variable that nobody is to set.
func TestNoKubeconfigSaysWhatToGive(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	check.Fails(t, check.Err(OpenCluster("", "", "")), "--kubeconfig", "--csi-socket")
}
