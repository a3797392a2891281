//go:build system

package front

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/kubeletemu"
)

// TestKubeletFollowsEveryRestart has the real daemon and the real driver register
// with a plugin watcher that has kubelet's traps, and restarts each of them while
// a pod has a volume.
func TestKubeletFollowsEveryRestart(t *testing.T) {
	n := newNode(t, deferAll)
	kubelet := n.kubelet()
	n.wantRegistered(kubelet)
	v := n.create("pv-1", "ext4", 16*mib)
	must(t, n.stage(v))
	must(t, n.publish(v, "pod-1"))

	n.Kill()
	n.Start()
	eventually(t, "registered again after a kill of the daemon", func() bool { return kubelet.Count(kubeletemu.Registered) > 1 })
	n.wantRegistered(kubelet)
	n.Signal(unix.SIGTERM)
	n.WaitEnd(20 * time.Second)
	if kubelet.Endpoint(driverName) == "" {
		t.Error("kubelet lost the driver while the daemon was away")
	}
	n.Start()
	n.wantRegistered(kubelet)
	n.driver.kill()
	n.startDriver()
	n.wantRegistered(kubelet)
	kubelet.Stop()
	kubelet = n.kubelet()
	n.wantRegistered(kubelet)
	for _, event := range kubelet.Events() {
		if event.Kind == kubeletemu.Refused {
			t.Errorf("kubelet refused the driver: %+v", event)
		}
	}
	must(t, n.publish(v, "pod-1"))
	must(t, n.unpublish(v, "pod-1"))
	must(t, n.unstage(v))
	n.remove(v)
	n.wantClean()
}

func (n *node) kubelet() *kubeletemu.Kubelet {
	n.t.Helper()
	kubelet, err := kubeletemu.Start(n.Kubelet+"/plugins_registry", 100*time.Millisecond)
	must(n.t, err)
	n.t.Cleanup(kubelet.Stop)
	return kubelet
}

// wantRegistered waits until kubelet would call the front's socket for the driver,
// and asserts that this works.
func (n *node) wantRegistered(kubelet *kubeletemu.Kubelet) {
	n.t.Helper()
	eventually(n.t, "kubelet calls the front", func() bool { return kubelet.Endpoint(driverName) == n.csiSocket() && n.served() })
	eventually(n.t, "crust-proxy knows kubelet's word", func() bool {
		reply, err := n.Admin().ListDrivers(context.Background(), &adminv1.ListDriversRequest{})
		return err == nil && len(reply.GetDrivers()) == 1 && strings.HasPrefix(reply.GetDrivers()[0].GetKubeletStatus(), "registered")
	})
	_, err := csi.NewIdentityClient(n.conn).Probe(n.t.Context(), &csi.ProbeRequest{})
	must(n.t, err)
}

// TestDirectRegistrationIsAnAlarm is a Helm upgrade that lost the patch: the
// driver registers with kubelet itself, and would mount deferred volumes.
func TestDirectRegistrationIsAnAlarm(t *testing.T) {
	n := newNode(t, deferAll)
	v := n.create("pv-1", "ext4", 16*mib)
	must(t, n.stage(v))
	must(t, n.publish(v, "pod-1"))
	n.driver.kill()
	for i, arg := range n.driverArgs {
		if arg == "--kubelet-registration-socket" {
			n.driverArgs[i+1] = n.Kubelet + "/plugins_registry/" + driverName + "-reg.sock"
		}
	}
	must(t, os.Remove(n.registry()+"/"+driverName+"-reg.sock"))
	n.startDriver()
	eventually(t, "the finding", func() bool {
		reply, err := n.Admin().GetNode(t.Context(), &adminv1.GetNodeRequest{})
		return err == nil && strings.Contains(strings.Join(reply.GetFindings(), "\n"), "registered with kubelet directly")
	})
	eventually(t, "a metric and the log tell of it", func() bool {
		metrics, err := n.HTTP("/metrics")
		return err == nil && strings.Contains(metrics, `crust_proxy_driver_bypassed{driver="`+driverName+`"} 1`) && strings.Contains(n.Log(), "directly")
	})
	// The driver, asked by kubelet past us, cannot mount the volume.
	direct := csi.NewNodeClient(dial(t, n.driverSocket()))
	must(t, os.MkdirAll(v.staging(n), 0o750))
	_, err := direct.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging(n), VolumeCapability: v.capability(),
	})
	if err == nil {
		t.Error("the driver mounted a deferred volume on the host")
	}
	n.driver.kill()
	must(t, os.Remove(n.Kubelet+"/plugins_registry/"+driverName+"-reg.sock"))
	for i, arg := range n.driverArgs {
		if arg == "--kubelet-registration-socket" {
			n.driverArgs[i+1] = n.registry() + "/" + driverName + "-reg.sock"
		}
	}
	n.startDriver()
	n.waitServed()
	eventually(t, "no finding any more", func() bool {
		reply, err := n.Admin().GetNode(t.Context(), &adminv1.GetNodeRequest{})
		return err == nil && len(reply.GetFindings()) == 0
	})
	n.insist("unpublish", func() error { return n.unpublish(v, "pod-1") })
	n.insist("unstage", func() error { return n.unstage(v) })
	n.remove(v)
	n.wantClean()
}
