//go:build system

package containerd

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// versions are the containerds that tests run on: the machine's, which is
// Debian's 1.6 where these tests are at home, and a current 2.x that is built
// from its module.
var versions = []string{"installed", "2.x"}

// programs is the directory of a version's programs.
func programs(t testing.TB, version string) string {
	t.Helper()
	if version == "installed" {
		rig.Need(t, "containerd", "containerd-shim-runc-v2")
		return ""
	}
	out, err := exec.Command("../../hack/containerd.sh").Output()
	if err != nil {
		t.Fatalf("build containerd 2.x: %v", err)
	}
	return strings.TrimSpace(string(out))
}

// newNode makes a node that goes with the test, and looks for what its pods
// leave.
func newNode(t testing.TB, version string, handlers map[string]string, env ...string) *cri.Node {
	t.Helper()
	rig.Need(t, "runc", "busybox")
	return cri.New(t, cri.Options{Programs: programs(t, version), Handlers: handlers, Env: env})
}

// onEach runs a test on every containerd.
func onEach(t *testing.T, test func(t *testing.T, version string)) {
	for _, version := range versions {
		t.Run(version, func(t *testing.T) { test(t, version) })
	}
}
