//go:build system

package kube_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// TestAsIfItWereNotThere takes volumes that are not deferred through all that a pod does with them, behind crust-proxy
// and without it: pods find the same, and drivers are called for the same.
func TestAsIfItWereNotThere(t *testing.T) {
	k := cluster.Beside(t)
	var found sync.Map
	story := func(name, driver string, tell func(*cluster.Kube, string) []string) {
		t.Run(name+" "+driver, func(t *testing.T) {
			t.Parallel()
			found.Store(name+" "+driver, tell(k.For(t), driver))
		})
	}
	t.Cleanup(func() {
		for name, drivers := range map[string][]string{"life": {cluster.Block, cluster.Native}, "inline": {cluster.Native}} {
			want := recall(&found, name+" "+cluster.Plain)
			t.Log(want)
			for _, driver := range drivers {
				check.Equal(t, recall(&found, name+" "+driver), want, "%s", driver)
			}
		}
	})
	for _, driver := range []string{cluster.Block, cluster.Native, cluster.Plain} {
		story("life", driver, plainLife)
	}
	// A driver that is not told of pods cannot have inline volumes.
	for _, driver := range []string{cluster.Native, cluster.Plain} {
		story("inline", driver, plainInline)
	}
}

func recall(found *sync.Map, name string) string {
	told, _ := found.Load(name)
	lines, _ := told.([]string)
	return strings.Join(lines, "\n")
}

// looks runs scripts and notes what they wrote, but for what names the driver.
func looks(k *cluster.Kube, p *cluster.Pod, scripts ...string) []string {
	k.T.Helper()
	var found []string
	for _, script := range scripts {
		out, err := p.TryExec("main", script)
		found = append(found, fmt.Sprintf("%s: %q, %v", script, out, err))
	}
	return found
}

// plainLife gives what pods found and what the driver was called for.
func plainLife(k *cluster.Kube, driver string) []string {
	id, _, _ := strings.Cut(driver, ".")
	files := k.NewVolume(cluster.VolumeOptions{Name: "files-" + id, Driver: driver, FS: "xfs", Options: []string{"noatime"}})
	disk := k.NewVolume(cluster.VolumeOptions{Name: "disk-" + id, Driver: driver, Raw: true})
	heard := callsFrom(k, driver)
	p := withGroup(k.NewPod("life-"+id, cluster.Runc).With(files, "/data").With(files, "/sub", subPath("some/dir")).
		With(disk, "/dev/disk"), corev1.FSGroupChangeAlways).Start()
	wantOnHost(k, p, files)
	found := looks(k, p,
		"id && stat -c '%u %g %a' /data /sub", "grep -E ' /(data|sub) ' /proc/mounts | cut -d' ' -f2-",
		"echo a > /data/a; echo b > /sub/b; ls -lnR /data | cut -c1-45; stat -c '%u %g %a' /data/a /sub/b",
		"ls -ln /dev/disk | cut -c1-20", spaceOf("/data"))
	p.WaitStats(files, "/data")
	files.Grow(2 * files.Size)
	files.WaitGrown()
	found = append(found, looks(k, p, spaceOf("/data"))...)
	p.Delete()
	heard.waitUnstaged(files)
	reader := readsOnly(k.NewPod("reads-"+id, cluster.Runc).With(files, "/data"), files).Start()
	found = append(found, looks(k, reader, "cat /data/a /data/some/dir/b", "touch /data/x", "grep ' /data ' /proc/mounts | cut -d' ' -f2-")...)
	reader.Delete()
	heard.waitUnstaged(files)
	heard.waitUnstaged(disk)
	return append(found, heard.told(files), heard.told(disk))
}

// waitUnstaged waits for kubelet's last call: it comes some time after the last pod
// went, and not at all where another one came meanwhile.
func (c *calls) waitUnstaged(v *cluster.Volume) {
	c.k.T.Helper()
	c.k.Eventually("kubelet unstages volume "+v.Name, func(context.Context) error {
		if all := c.of(v); len(all) == 0 || all[len(all)-1] != "NodeUnstageVolume" {
			return fmt.Errorf("the driver was called: %s", all)
		}
		return nil
	})
}

func plainInline(k *cluster.Kube, driver string) []string {
	id, _, _ := strings.Cut(driver, ".")
	p := withGroup(k.NewPod("own-inline-"+id, cluster.Runc).WithInline("inline", driver, "/inline", 64*cluster.Mib), corev1.FSGroupChangeAlways).Start()
	found := looks(k, p, "stat -c '%u %g %a' /inline; echo a > /inline/a; stat -c '%u %g %a' /inline/a",
		"grep ' /inline ' /proc/mounts | cut -d' ' -f2-", spaceOf("/inline"))
	p.Delete()
	return found
}

// spaceOf is df without the device, whose number says nothing.
func spaceOf(path string) string {
	// What is not written yet has more room than it needs reserved.
	return "sync; for unit in -k -i; do df -P $unit " + path + " | tail -n 1 | sed 's/^[^ ]* *//' | tr -s ' '; done"
}

// told is what a driver was called for, in order. How often it is asked for stats depends on the time that all takes.
func (c *calls) told(v *cluster.Volume) string {
	all := c.of(v)
	stats := slices.Contains(all, "NodeGetVolumeStats")
	all = slices.DeleteFunc(all, func(call string) bool { return call == "NodeGetVolumeStats" })
	return fmt.Sprintf("stats of a filesystem: %t; %s", stats || v.Raw, slices.Compact(all))
}
