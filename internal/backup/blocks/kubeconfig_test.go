package blocks

import (
	"path/filepath"
	"strings"
	"testing"
)

// TestNoKubeconfigSaysWhatToGive: client-go's words name a variable that nobody is to set.
func TestNoKubeconfigSaysWhatToGive(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	_, err := OpenCluster("", "", "")
	if err == nil || !strings.Contains(err.Error(), "--kubeconfig") || !strings.Contains(err.Error(), "--csi-socket") {
		t.Error(err)
	}
}
