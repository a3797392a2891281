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
	inEachWay(cluster.Beside(t), t, "life", func(k *cluster.Kube, way, driver string) {
		v := k.NewVolume(cluster.VolumeOptions{Name: "slice-" + way, Driver: driver, FS: "xfs"})
		first := k.NewPod("first-"+way, cluster.Crust).With(v, "/data").Start()
		first.Exec("echo kept > /data/file && sync && cat /data/file")
		wantGuarded(k, first, v)
		if has := first.WaitStats(v, "/data"); has.Total < v.Size/2 || has.Used == 0 {
			k.T.Errorf("the stats are %+v", has)
		}
		first.Delete()
		second := k.NewPod("second-"+way, cluster.Crust).With(v, "/data").Start()
		wantOut(k, second, "main", "cat /data/file", "kept\n")
		second.Delete()
	})
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
