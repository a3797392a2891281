//go:build system

package containerd

import (
	"testing"

	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
	"github.com/crust-proxy/crust-proxy/test/rig/snapshots"
)

// TestSnapshotsInASandbox takes one of a volume that only a sandbox has mounted.
func TestSnapshotsInASandbox(t *testing.T) {
	r := layOut(t)
	images := rig.Pool(t, "xfs", rig.Disk(t, 8<<30, "xfs")) // which shares data, so that volumes in use have snapshots
	driver := csivolume.Start(t, r.d, "--data-dir", images, "--freeze-limit", "60s")
	for _, fs := range filesystems {
		v := driver.Create(t, "pv-"+fs, fs, diskSize)
		v.Publish()
		pod := r.pod(v.Pod)
		r.exec(r.run(pod, "main", at(v.Target)), "echo written > /data/unsynced")
		snapshots.WantClean(t, v, images)
		r.remove(pod)
		v.Unpublish()
		v.Delete()
	}
	r.wantClean()
}
