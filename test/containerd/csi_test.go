//go:build system

package containerd

import (
	"strings"
	"testing"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
)

// csiVolume is a volume of the reference driver, as kubelet sees it: behind the
// front.
type csiVolume struct {
	*testNode
	*csivolume.Volume
}

// newCSINode makes a node whose daemon stands in front of the reference driver.
func newCSINode(t *testing.T, args ...string) *testNode {
	t.Helper()
	r := layOut(t)
	r.driver = csivolume.Start(t, r.d, args...)
	return r
}

// newSnapshotNode makes one where data is shared, so that volumes in use have snapshots.
func newSnapshotNode(t *testing.T, args ...string) *testNode {
	t.Helper()
	images := rig.Pool(t, "xfs", rig.Disk(t, 8<<30, "xfs"))
	r := newCSINode(t, append([]string{"--data-dir", images}, args...)...)
	r.driver.Data = images
	return r
}

// create has the driver make a volume for a pod of its own.
func (r *testNode) create(name, fs string, size int64) *csiVolume {
	r.t.Helper()
	return &csiVolume{testNode: r, Volume: r.driver.Create(r.t, name, fs, size)}
}

// giveBack is all that kubelet calls after it has removed the sandbox, and deletes the volume.
func (v *csiVolume) giveBack() {
	v.t.Helper()
	v.Unpublish()
	v.Delete()
}

// wantNoGrowth wants a growth to leave the record once it is done. Stats show that.
func (v *csiVolume) wantNoGrowth() {
	v.t.Helper()
	check.Eventually(v.t, "no growth is pending", func() bool {
		_, err := v.Stats()
		check.Must(v.t, err)
		shown, err := v.d.Admin().GetVolume(v.ctx(), &adminv1.GetVolumeRequest{Volume: v.Target})
		check.Must(v.t, err)
		return shown.GetVolume().GetGrowToBytes() == 0
	})
}

// wantStats wants kubelet to hear what df tells inside.
func (v *csiVolume) wantStats(container string) usage {
	v.t.Helper()
	var inside usage
	v.WantUsage(func() csivolume.Usage {
		inside = v.df(container)
		return csivolume.Usage{Total: inside.bytesTotal, Used: inside.bytesUsed, Available: inside.bytesAvailable}
	})
	return inside
}

// TestCSIVolumeInAPod takes a volume of a CSI driver through everything that
// kubelet does with it and its pod.
func TestCSIVolumeInAPod(t *testing.T) {
	for name, args := range map[string][]string{"block": nil, "native": {"--defer"}} {
		t.Run(name, func(t *testing.T) {
			r := newCSINode(t, args...)
			for _, fs := range rig.Sample(filesystems, 2) {
				t.Run(fs, func(t *testing.T) { r.of(t).lifeOfACSIVolume(fs) })
			}
			r.wantClean()
		})
	}
}

func (r *testNode) lifeOfACSIVolume(fs string) {
	r.t.Helper()
	v := r.create("pv-"+fs, fs, diskSize)
	v.Publish()
	// Kubelet expands before there is a sandbox, and starts no pod where that fails.
	check.Must(r.t, v.Grow(2*diskSize))
	pod := r.pod(v.Pod)
	id := r.run(pod, "main", at(v.Target))
	if has := v.wantStats(id); has.bytesTotal < 2*diskSize*8/10 {
		r.t.Errorf("the filesystem has %d bytes after it was grown before its mount", has.bytesTotal)
	}
	if fs == "xfs" { // that leaves its superblock in the log, for a minute or two: the sandbox's answer says it
		_, err := v.d.Admin().ExpandVolume(v.ctx(), &adminv1.ExpandVolumeRequest{Volume: v.Target})
		check.Must(r.t, err)
	}
	v.wantNoGrowth()
	r.exec(id, "echo kept > /data/file && sync")
	err := v.Grow(3 * diskSize)
	if rig.MayGrow(r.t, fs) {
		check.Must(r.t, err)
		if has := v.wantStats(id); has.bytesTotal < 3*diskSize*8/10 {
			r.t.Errorf("the filesystem has %d bytes after it was grown", has.bytesTotal)
		}
	} else if err == nil || !strings.Contains(err.Error(), "operation not permitted") {
		r.t.Errorf("without the right to grow: %v", err)
	}
	v.Publish() // kubelet was restarted
	if got := r.exec(id, "cat /data/file"); got != "kept\n" {
		r.t.Errorf("it reads %q", got)
	}
	v.wantStats(id)
	r.remove(pod)
	v.giveBack()
}
