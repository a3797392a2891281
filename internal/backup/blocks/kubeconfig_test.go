package blocks

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestNoKubeconfigSaysWhatToGive: client-go's words name a variable that nobody is to set.
func TestNoKubeconfigSaysWhatToGive(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	_, err := OpenCluster("", "", "")
	check.That(t, err != nil && strings.Contains(err.Error(), "--kubeconfig") && strings.Contains(err.Error(), "--csi-socket"), "%v", err)
}
