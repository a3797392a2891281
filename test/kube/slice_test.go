//go:build system

package kube_test

import (
	"os"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// ways are the drivers whose volumes are deferred, each in its own way.
var ways = map[string]string{"block": cluster.Block, "native": cluster.Native}

// TestSlice takes one volume through the lives of two pods.
func TestSlice(t *testing.T) {
	for way, driver := range ways {
		t.Run(way, func(t *testing.T) { slice(cluster.On(t), driver) })
	}
}

// TestSliceWithoutLookUp needs nothing of the cluster: rules go by the driver.
func TestSliceWithoutLookUp(t *testing.T) {
	k := cluster.On(t)
	k.Settings(cluster.ProxySettings{Rules: "[{name: behind-the-front, drivers: [" + cluster.Block + "], defer: true}]"})
	slice(k, cluster.Block)
}

// TestSliceOfAnotherRuntime is about pods that no rule is for: the driver's own
// mount is what they get, as if crust-proxy were not there.
func TestSliceOfAnotherRuntime(t *testing.T) {
	k := cluster.On(t)
	v := k.NewVolume(cluster.VolumeOptions{Name: "other", Driver: cluster.Block})
	p := k.NewPod("other", cluster.Runc).With(v, "/data").Start()
	p.Exec("echo kept > /data/file")
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	k.Must(err)
	if !strings.Contains(string(mounts), p.Target(v)+" ") || !strings.Contains(string(mounts), " - ext4 /dev/loop") {
		t.Errorf("it is not mounted on the node:\n%s", mounts)
	}
	p.WaitStats(v, "/data")
}

func slice(k *cluster.Kube, driver string) {
	k.T.Helper()
	v := k.NewVolume(cluster.VolumeOptions{Name: "slice", Driver: driver, FS: "xfs"}) // which any root may grow
	first := k.NewPod("first", cluster.Crust).With(v, "/data").Start()
	first.Exec("echo kept > /data/file && sync && cat /data/file")
	wantGuarded(k, first, v)
	if has := first.WaitStats(v, "/data"); has.Total < v.Size/2 || has.Used == 0 {
		k.T.Errorf("the stats are %+v", has)
	}
	v.Grow(2 * v.Size)
	v.WaitGrown()
	if has := first.WaitStats(v, "/data"); has.Total < v.Size*8/10 {
		k.T.Errorf("the stats are %+v after it was grown to %d", has, v.Size)
	}
	first.Delete()
	second := k.NewPod("second", cluster.Crust).With(v, "/data").Start()
	if got := second.Exec("cat /data/file"); got != "kept\n" {
		k.T.Errorf("the second pod reads %q", got)
	}
	second.Delete()
}

// wantGuarded wants the volume's filesystem in the pod, and nowhere on the node.
func wantGuarded(k *cluster.Kube, p *cluster.Pod, v *cluster.Volume) {
	k.T.Helper()
	is, err := crustctl(k, p.Target(v))
	k.Must(err)
	if got := p.Exec("grep ' /data ' /proc/mounts"); !strings.Contains(got, " "+v.FS+" ") {
		k.T.Errorf("the pod has %q", got)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	k.Must(err)
	for line := range strings.SplitSeq(string(mounts), "\n") {
		if strings.Contains(line, p.Target(v)) && !strings.Contains(line, " tmpfs crust:") {
			k.T.Errorf("at the target is no guard: %s", line)
		}
		if strings.Contains(line, " - "+v.FS+" "+is.Device+" ") {
			k.T.Errorf("it is mounted on the node: %s", line)
		}
	}
}
