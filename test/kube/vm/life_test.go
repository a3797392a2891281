//go:build system

package vm

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/crust-proxy/crust-proxy/reference/mountwatch"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/snapshots"
)

func TestMain(m *testing.M) { os.Exit(cluster.MainVM(m)) }

// class is what an administrator makes, as docs/crust-runc.md says.
const class = "{apiVersion: node.k8s.io/v1, kind: RuntimeClass, metadata: {name: crust-vm}, handler: crust-vm}"

// mark is what is looked for on the device.
const mark = "this was written by a pod in a virtual machine"

// node is a cluster whose pods run in virtual machines.
type node struct {
	*cluster.Kube
	mounts *mountwatch.Watch
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{Kube: cluster.On(t)}
	settings := n.DefaultProxy()
	settings.Rules = "[{name: in-machines, runtimeHandlers: [" + cluster.CrustVM + "], defer: true}]"
	n.Settings(settings)
	n.StartSidecars(cluster.Block)
	check.Must(t, n.Apply(class))
	n.watch()
	return n
}

// watch has every mount of a loop device be a failure from now on, but for those that the
// rig has mounted for itself. It comes before the volume has a device.
func (n *node) watch() {
	n.T.Helper()
	mounted := check.Value(os.ReadFile("/proc/self/mountinfo"))(n.T)
	n.mounts = check.Value(mountwatch.New())(n.T)
	n.T.Cleanup(func() { check.Must(n.T, n.mounts.Close()) })
	for i := range 1024 {
		number, name := fmt.Sprintf("7:%d", i), fmt.Sprintf("/dev/loop%d", i)
		if !strings.Contains(string(mounted), " "+number+" ") {
			n.mounts.Add(number, name)
		}
	}
}

// pod is one with the volume. Kubelet asks in the guest whether it is mounted.
func (n *node) pod(name string, v *cluster.Volume) *cluster.Pod {
	p := n.NewPod(name, cluster.CrustVM).With(v, "/data").Script("uname -r; " + cluster.Forever)
	p.Spec.Containers[0].StartupProbe = &corev1.Probe{
		PeriodSeconds: 1, TimeoutSeconds: 20, FailureThreshold: 100,
		ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"grep", " /data xfs ", "/proc/mounts"}}},
	}
	return p
}

// TestLifeOfAClaim takes a claim through all that kubelet and the sidecars do with it,
// and its filesystem is never mounted on the node.
func TestLifeOfAClaim(t *testing.T) {
	n := newNode(t)
	v := n.NewClaim(cluster.VolumeOptions{Name: "data", Driver: cluster.Block})
	first := n.pod("first", v).Start()
	v.Bound()
	log, err := first.Log("main")
	check.That(t, err == nil && strings.Contains(log, "-cloud-"), "the pod's log: %q, %v", log, err)
	first.Exec("echo '" + mark + "' > /data/file && sync")
	has := first.WaitStats(v, "/data")
	check.That(t, has.Total >= v.Size*8/10 && has.Total <= v.Size, "the stats are %+v of %d bytes", has, v.Size)
	n.grow(first, v)
	first.Delete()
	second := n.pod("second", v).Start()
	check.Equal(t, second.Exec("cat /data/file"), mark+"\n", "the second pod reads")
	second.Delete()
	image := n.free(v)
	check.Must(t, n.mounts.CheckNone())
	for _, command := range [][]string{{"xfs_repair", "-n", "-f", image}, {"grep", "-aq", mark, image}} {
		out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
		check.That(t, err == nil, "%q: %v\n%s", command, err, out)
	}
	check.Must(t, v.RemoveClaim())
	check.Is(t, check.Err(os.Stat(image)), os.ErrNotExist) // the volume's image
}

// grow grows the claim while a pod writes to it.
func (n *node) grow(p *cluster.Pod, v *cluster.Volume) {
	n.T.Helper()
	p.Exec("(while date >> /data/log && sync; do :; done) >/dev/null 2>&1 & echo $! > /tmp/writer")
	v.Edit(2 * v.Size)
	v.WaitGrown()
	p.Exec("kill $(cat /tmp/writer) && sync")
	has := p.WaitStats(v, "/data")
	check.That(n.T, has.Total >= v.Size*8/10 && has.Total <= v.Size, "the stats are %+v after it was grown to %d bytes", has, v.Size)
}

// free waits until nobody has the volume, and gives its image.
func (n *node) free(v *cluster.Volume) string {
	n.T.Helper()
	image := snapshots.Image(n.Dir+"/data/"+v.Driver, v.Handle)
	n.Eventually("the volume has no device", func(context.Context) error {
		if left := rig.Loops(image); len(left) > 0 {
			return fmt.Errorf("it has %v", left)
		}
		return nil
	})
	return image
}
