//go:build system

package examples

import (
	"os"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
)

func TestMain(m *testing.M) { os.Exit(rig.Main(m)) }

const driverName = "example.crust-proxy.dev"

// TestBoth goes the whole way of a volume of the example driver in a pod of the example handler: it is
// formatted, mounted, measured, grown, and goes back.
func TestBoth(t *testing.T) {
	rig.Need(t, "busybox", "mkfs.xfs")
	d := rig.NewDaemon(t)
	handler, driver, data := d.Dir+"/runtime-handler", d.Dir+"/csi-driver", d.Dir+"/data"
	check.Must(t, rig.BuildStatic(handler, "examples/runtime-handler"))
	check.Must(t, rig.BuildStatic(driver, "examples/csi-driver"))
	node := cri.New(t, cri.Options{Handlers: map[string]string{"example": handler}})
	d.Containerd = node.Socket
	d.Handlers = "default: crust\ncrust: {enabled: true, programs: [" + handler + "], tempDir: /run/crust-temp}"
	d.Extra = "front: {enabled: true}\npolicy: {rules: [{name: all, defer: true}]}"
	for _, dir := range []string{d.Kubelet + "/crust-proxy/registry", d.Kubelet + "/plugins_registry"} {
		check.Must(t, os.MkdirAll(dir, 0o755))
	}
	process := &rig.Process{
		Name: "the driver", Program: driver, LogFile: d.Dir + "/log/driver",
		Args: []string{"--endpoint", d.Dir + "/csi.sock", "--data", data, "--registration", d.Kubelet + "/crust-proxy/registry/example-reg.sock"},
	}
	check.Must(t, process.Launch())
	t.Cleanup(process.Kill)
	d.Start()
	client := csivolume.NewClient(d.Dial(d.Dir+"/run/csi/"+driverName+".sock"), driverName, d.Kubelet)
	client.Wait(t)
	const size = 320 << 20
	v := client.Create(t, "data", "xfs", size)
	v.Publish()
	check.That(t, os.WriteFile(v.Target+"/file", []byte("data"), 0o600) != nil, "there is no guard at the target")
	for _, text := range []string{"first", "second"} { // the second pod finds what the first one wrote
		pod := check.Value(node.RunPod(t.Context(), v.Pod, "example", 0))(t)
		container := check.Value(pod.Run(t.Context(), cri.Container{Name: "app", Mounts: []cri.Mount{{Host: v.Target, Container: "/data"}}}))(t)
		run := func(script string) string {
			return check.Value(node.Exec(t.Context(), container, script))(t)
		}
		got := run("echo " + text + " >>/data/file; cat /data/file; grep ' /data ' /proc/mounts")
		check.That(t, strings.HasPrefix(got, "first\n") && strings.Contains(got, " xfs "), "%s", got)
		if text == "first" {
			before := run("stat -f -c %b /data")
			check.Must(t, v.Grow(2*size))
			check.That(t, run("stat -f -c %b /data") != before, "it has not grown")
		}
		stats, err := v.Stats()
		check.That(t, err == nil && stats.GetUsage()[0].GetTotal() >= size*3/2, "stats: %v, %v", stats, err)
		check.Must(t, pod.Remove(t.Context()))
		v.Unpublish()
		if text == "first" {
			v.For("pod-2")
			check.Must(t, v.TryPublish())
		}
	}
	v.Delete()
	d.WantClean()
	left, err := os.ReadDir(data)
	check.That(t, err == nil && len(left) == 0 && len(rig.LoopsLeft(data+"/")) == 0, "the driver has left %v, %v", left, err)
}
