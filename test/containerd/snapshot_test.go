//go:build system

package containerd

import (
	"crypto/sha256"
	"fmt"
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/superblock"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestSnapshotOfAVolumeInASandbox has the driver ask crust-proxy to freeze a filesystem
// that only the sandbox has mounted: what was written is there without a sync, and nothing
// is left to be replayed.
func TestSnapshotOfAVolumeInASandbox(t *testing.T) {
	for name, args := range map[string][]string{"block": nil, "native": {"--defer"}} {
		t.Run(name, func(t *testing.T) {
			images := t.TempDir()
			check.Must(t, unix.Mount(rig.Disk(t, 4<<30, "xfs"), images, "xfs", 0, ""))
			t.Cleanup(func() { check.Must(t, unix.Unmount(images, 0)) })
			r := newCSINode(t, "installed", append([]string{"--data-dir", images}, args...)...)
			v := r.create("pv", "ext4", diskSize)
			v.publish()
			pod := r.pod(v.pod)
			id := r.run(pod, "main", at(v.target))
			r.exec(id, "echo kept > /data/file")
			made, err := v.controller.CreateSnapshot(r.ctx(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v.id})
			check.Must(t, err)
			r.exec(id, "echo later > /data/file") // writes go on
			snapshot := made.GetSnapshot().GetSnapshotId()
			wantFrozen(t, fmt.Sprintf("%s/images/%x.img", images, sha256.Sum256([]byte(snapshot))))
			_, err = v.controller.DeleteSnapshot(r.ctx(), &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
			check.Must(t, err)
			r.remove(pod)
			v.unpublish()
			r.wantClean()
		})
	}
}

// wantFrozen looks at the image of a snapshot of a frozen ext4.
func wantFrozen(t *testing.T, path string) {
	t.Helper()
	image, err := os.Open(path)
	check.Must(t, err)
	defer func() { _ = image.Close() }()
	if dirty, err := superblock.NeedsReplay(image, "ext4"); err != nil || dirty {
		t.Errorf("it needs a replay: %v, %v", dirty, err)
	}
	dir := t.TempDir()
	check.Must(t, unix.Mount(rig.Loop(t, path, loopdev.Options{ReadOnly: true}), dir, "ext4", unix.MS_RDONLY, ""))
	defer func() { check.Must(t, unix.Unmount(dir, 0)) }()
	if raw, err := os.ReadFile(dir + "/file"); err != nil || string(raw) != "kept\n" {
		t.Errorf("it has %q: %v", raw, err)
	}
}
