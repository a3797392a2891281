//go:build system

package containerd

import (
	"testing"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/harness"
)

const mib = 1 << 20

func unstage(t *testing.T, d *harness.Daemon, target string) {
	t.Helper()
	_, err := d.Runtime().RuntimeUnstageVolume(t.Context(), &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: target})
	must(t, err)
}
