//go:build system

package containerd

import (
	"os"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/snapshots"
)

// TestSnapshotOfAVolumeInASandbox has the driver ask crust-proxy to freeze a filesystem
// that only the sandbox has mounted: what was written is there without a sync, and nothing
// is left to be replayed. A claim that may only be read shows it to another sandbox.
func TestSnapshotOfAVolumeInASandbox(t *testing.T) {
	for name, args := range map[string][]string{"block": nil, "native": {"--defer"}} {
		t.Run(name, func(t *testing.T) {
			r := newSnapshotNode(t, args...)
			for _, fs := range filesystems {
				v := r.create("pv-"+fs, fs, diskSize)
				v.Publish()
				pod := r.pod(v.Pod)
				id := r.run(pod, "main", at(v.Target))
				r.exec(id, "echo kept > /data/file")
				made, err := v.snapshot("s-" + fs)
				check.Must(t, err)
				r.exec(id, "echo later > /data/file") // writes go on
				wantFrozen(t, snapshots.Image(r.driver.Data, made), fs)
				r.readFrozen(r.restore("reader-"+fs, fs, made), name == "native")
				v.removeSnapshot(made)
				r.remove(pod)
				v.giveBack()
			}
			r.wantClean()
		})
	}
}

// readFrozen reads a restored snapshot by a ReadOnlyMany claim. Only a driver that defers by
// itself knows that the log of an xfs need not be replayed.
func (r *testNode) readFrozen(v *csiVolume, native bool) {
	r.t.Helper()
	v.Mode = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	if v.FS == "xfs" && !native {
		check.Must(r.t, v.Stage())
		if err := v.TryPublish(); err == nil || !strings.Contains(err.Error(), "mountOptions: [norecovery]") {
			r.t.Errorf("the error does not say what helps: %v", err)
		}
		check.Must(r.t, v.Unstage())
		v.Flags = []string{"norecovery"}
	}
	v.Publish()
	pod := r.pod(v.Pod)
	if got := r.exec(r.run(pod, "reader", at(v.Target)), "cat /data/file"); got != "kept\n" {
		r.t.Errorf("%s: it reads %q", v.FS, got)
	}
	r.remove(pod)
	v.giveBack()
}

// wantFrozen looks at the image of a snapshot of a frozen filesystem.
func wantFrozen(t *testing.T, image, fs string) {
	t.Helper()
	if snapshots.NeedsReplay(t, image, fs) != (fs == "xfs") { // a frozen xfs has something in its log on purpose
		t.Errorf("%s: whether it needs a replay is not as it should be", fs)
	}
	check.Must(t, snapshots.AsItIs(t, image, fs, func(dir string) {
		if raw, err := os.ReadFile(dir + "/file"); err != nil || string(raw) != "kept\n" {
			t.Errorf("it has %q: %v", raw, err)
		}
	}))
}
