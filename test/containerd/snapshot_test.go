//go:build system

package containerd

import (
	"os"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/snapshots"
)

// TestSnapshotOfAVolumeInASandbox has the driver ask crust-proxy to freeze a filesystem
// that only the sandbox has mounted: what was written is there without a sync, and nothing
// is left to be replayed.
func TestSnapshotOfAVolumeInASandbox(t *testing.T) {
	for name, args := range map[string][]string{"block": nil, "native": {"--defer"}} {
		t.Run(name, func(t *testing.T) {
			r := newSnapshotNode(t, args...)
			v := r.create("pv", "ext4", diskSize)
			v.Publish()
			pod := r.pod(v.Pod)
			id := r.run(pod, "main", at(v.Target))
			r.exec(id, "echo kept > /data/file")
			made, err := v.snapshot("s")
			check.Must(t, err)
			r.exec(id, "echo later > /data/file") // writes go on
			wantFrozen(t, snapshots.Image(r.driver.Data, made))
			v.removeSnapshot(made)
			r.remove(pod)
			v.giveBack()
			r.wantClean()
		})
	}
}

// wantFrozen looks at the image of a snapshot of a frozen ext4.
func wantFrozen(t *testing.T, image string) {
	t.Helper()
	if snapshots.NeedsReplay(t, image, "ext4") {
		t.Error("it needs a replay")
	}
	check.Must(t, snapshots.AsItIs(t, image, "ext4", func(dir string) {
		if raw, err := os.ReadFile(dir + "/file"); err != nil || string(raw) != "kept\n" {
			t.Errorf("it has %q: %v", raw, err)
		}
	}))
}
