//go:build system

package kube_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// TestUpgradeUnderPods replaces crust-proxy by a build of another version, without
// draining the node, and then goes back to the first one.
func TestUpgradeUnderPods(t *testing.T) {
	k := cluster.On(t)
	lanes := newLanes(k)
	stay := running(k, lanes, 0)
	installed, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", k.Proxy.Pid()))
	k.Must(err)
	kept := installed + ".old"
	k.Must(os.Link(installed, kept))
	t.Cleanup(func() {
		if err := os.Rename(kept, installed); err == nil { // the test has ended half-way
			k.Must(k.Proxy.Restart())
		}
	})
	versions := []string{version(k)}
	for i, next := range []string{otherVersion(k, filepath.Dir(installed)), kept} {
		// As a package does it: the file is replaced, and the service restarted.
		k.Must(os.Rename(next, installed))
		k.Must(k.Proxy.Restart())
		versions = append(versions, version(k))
		for _, w := range stay {
			w.unchanged(k, false)
		}
		coming := running(k, lanes, i+1)
		k.Eventually("all is well", func(ctx context.Context) error { return well(ctx, append(coming, stay...)) })
		leave(k, stay)
		hasLeft(k, stay)
		stay = coming
	}
	t.Logf("the versions were %q", versions)
	if versions[0] == versions[1] || versions[0] != versions[2] {
		t.Errorf("the versions were %q", versions)
	}
	leave(k, stay)
	hasLeft(k, stay)
}

// version is what the daemon that runs says of itself.
func version(k *cluster.Kube) string {
	k.T.Helper()
	ctx := k.T.Context()
	node, err := admin(func(c adminv1.AdminClient) (*adminv1.GetNodeResponse, error) {
		return c.GetNode(ctx, &adminv1.GetNodeRequest{})
	})
	k.Must(err)
	return node.GetVersion()
}

// otherVersion builds a crust-proxy that calls itself otherwise: with the version
// control's word where the one that runs was built without, and the other way round.
func otherVersion(k *cluster.Kube, dir string) string {
	k.T.Helper()
	program := filepath.Join(dir, "crust-proxy.next")
	stamped := fmt.Sprintf("-buildvcs=%t", version(k) == "(devel)")
	out, err := exec.Command("go", "build", stamped, "-tags", "failpoints", "-o", program,
		"github.com/crust-proxy/crust-proxy/cmd/crust-proxy").CombinedOutput()
	if err != nil {
		k.T.Fatalf("%v\n%s", err, out)
	}
	return program
}
