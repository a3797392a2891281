//go:build system

package front

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

// TestIdleDaemonSleeps: with a registered driver and a volume, nothing wakes the daemon more than a few
// times a second, in some five seconds of a minute. A loop that polls would do so in each.
func TestIdleDaemonSleeps(t *testing.T) {
	t.Parallel()
	n := newNode(t, deferAll)
	n.wantRegistered(n.kubelet())
	v := n.create("pv-1", "ext4", 16*mib)
	n.up(v, "pod-1")
	const seconds = 5
	check.Eventually(t, "the daemon sleeps", func() bool {
		before := rig.WakeUps(t, n.Pid())
		time.Sleep(seconds * time.Second)
		woken := rig.WakeUps(t, n.Pid()) - before
		t.Logf("%d wake-ups in %d seconds", woken, seconds)
		return woken < 6*seconds
	})
	n.down(v, "pod-1")
}

// TestRestartWithoutFreeInodes: the socket of before has the inode that its successor needs.
func TestRestartWithoutFreeInodes(t *testing.T) {
	t.Parallel()
	n := newNode(t, deferAll)
	watcher := n.kubelet()
	n.wantRegistered(watcher)
	n.Kill()
	rig.UseUpInodes(n.Daemon)
	n.Start()
	n.waitServed()
	check.That(t, watcher.Count(kubelet.Deregistered) == 0, "kubelet lost the driver: %+v", watcher.Events())
}

func (n *node) kubelet() *kubelet.Kubelet {
	n.t.Helper()
	watcher := check.Value(kubelet.Start(n.Kubelet+"/plugins_registry", 100*time.Millisecond))(n.t)
	n.t.Cleanup(watcher.Stop)
	return watcher
}

// wantRegistered waits until kubelet would call the front's socket for the driver, and asserts that this works.
func (n *node) wantRegistered(watcher *kubelet.Kubelet) {
	n.t.Helper()
	check.Eventually(n.t, "kubelet calls the front", func() bool { return watcher.Endpoint(driverName) == n.driver.Front && n.served() })
	check.Succeeds(n.t, "crust-proxy knows kubelet's word", func() error {
		reply, err := n.Admin().ListDrivers(context.Background(), &adminv1.ListDriversRequest{})
		if err == nil && (len(reply.GetDrivers()) != 1 || !strings.HasPrefix(reply.GetDrivers()[0].GetKubeletStatus(), "registered")) {
			err = fmt.Errorf("the drivers are %v", reply.GetDrivers())
		}
		return err
	})
	check.Must(n.t, check.Err(csi.NewIdentityClient(n.driver.Conn).Probe(n.t.Context(), &csi.ProbeRequest{})))
}

// waitFindings waits until the daemon finds fault with the node in some words.
func (n *node) waitFindings(what, words string) {
	n.t.Helper()
	check.Succeeds(n.t, what, func() error {
		node, err := n.Admin().GetNode(n.t.Context(), &adminv1.GetNodeRequest{})
		found := strings.Join(node.GetFindings(), "\n")
		if err == nil && !strings.Contains(found, words) {
			err = fmt.Errorf("the findings are %q", found)
		}
		return err
	})
}
