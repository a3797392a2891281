//go:build system

package containerd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/database"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
	"github.com/crust-proxy/crust-proxy/test/rig/snapshots"
)

// program is a database in a container.
type program struct {
	*testNode
	container string
	// shared is a directory of the host that the container has.
	shared string
}

// database runs one in a sandbox, with its two files in the directories of volumes.
func (r *testNode) database(pod *cri.Pod, first, second *csivolume.Volume) *program {
	r.t.Helper()
	p := &program{testNode: r, shared: r.t.TempDir()}
	check.Must(r.t, rig.BuildStatic(p.shared+"/writer", "test/database/writer"))
	container, err := pod.Run(r.ctx(), cri.Container{
		Name: "database", Script: "/shared/writer /first /second /shared; exec sleep 2147483647", // the container stays, as others do
		Mounts: []cri.Mount{{Host: p.shared, Container: "/shared"}, {Host: first.Target, Container: "/first"}, {Host: second.Target, Container: "/second"}},
	})
	check.Must(r.t, err)
	p.container = container
	p.wantProgress()
	return p
}

// acknowledged is how many records the database calls safe.
func (p *program) acknowledged() uint64 {
	raw, err := os.ReadFile(p.shared + "/acknowledged")
	if err != nil || len(raw) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(raw)
}

// wantProgress waits until the database has written more.
func (p *program) wantProgress() {
	p.t.Helper()
	before := p.acknowledged()
	check.Eventually(p.t, "the database writes", func() bool { return p.acknowledged() > before })
}

func (p *program) stop() {
	p.t.Helper()
	check.Must(p.t, os.WriteFile(p.shared+"/stop", nil, 0o600))
	var ended []byte
	check.Eventually(p.t, "the database ends", func() (done bool) {
		ended, _ = os.ReadFile(p.shared + "/ended")
		return len(ended) > 0
	})
	check.That(p.t, string(ended) == fmt.Sprint(error(nil)), "the database failed: %s", ended)
}

// snapshots takes one of a volume each second.
func (p *program) snapshots(v *csivolume.Volume) (all []snapshots.Moment) {
	p.t.Helper()
	for n := range snapshots.Seconds() {
		next := time.Now().Add(time.Second)
		m := snapshots.Moment{Before: p.acknowledged()}
		made := check.Value(v.Snapshot(fmt.Sprint(v.ID, n)))(p.t)
		m.ID, m.After = made, p.acknowledged()
		all = append(all, m)
		time.Sleep(time.Until(next))
	}
	return all
}

func image(r *testNode, v *csivolume.Volume) string { return snapshots.Image(r.driver.Data, v.ID) }

// recordsAsTheyAre counts the records on the image, which is mounted here without a repair.
func (r *testNode) recordsAsTheyAre(v *csivolume.Volume) (count uint64, err error) {
	r.t.Helper()
	mounted := snapshots.AsItIs(r.t, image(r, v), v.FS, func(dir string) { count, err = database.Check(dir, dir) })
	return count, errors.Join(mounted, err)
}

// recordsInASandbox has a container count the records, whose sandbox mounts the volume.
func (p *program) recordsInASandbox(v *csivolume.Volume) (count uint64) {
	p.t.Helper()
	v.Publish()
	pod := p.pod(v.Pod)
	id := p.run(pod, "main", at(v.Target), cri.Mount{Host: p.shared, Container: "/shared"})
	_, err := fmt.Sscan(p.exec(id, "/shared/writer /data"), &count)
	check.Must(p.t, err)
	p.remove(pod)
	v.Unpublish()
	v.Delete()
	return count
}

// TestSnapshotsOfADatabaseInASandbox takes one a second of a volume that only a sandbox has
// mounted. Each restored one is mounted without a repair, and has all that was acknowledged
// in an unbroken chain.
func TestSnapshotsOfADatabaseInASandbox(t *testing.T) {
	r := layOut(t)
	images := rig.Pool(t, "xfs", rig.Disk(t, 8<<30, "xfs")) // which shares data, so that volumes in use have snapshots
	r.driver = csivolume.Start(t, r.d, "--data-dir", images)
	r.driver.Data = images
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			r := r.of(t)
			p, all := r.databaseAndItsSnapshots(fs)
			for _, m := range all {
				check.That(t, snapshots.Consistent(t, r.driver.Data, m.ID), "a snapshot is not consistent")
				restored := r.driver.Restore(t, "restored", fs, diskSize, &csi.VolumeContentSource{
					Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: m.ID}},
				})
				if fs != "xfs" && snapshots.NeedsReplay(t, image(r, restored), fs) { // a frozen xfs has something in its log on purpose
					t.Error("a journal has to be replayed")
				}
				count := check.Value(r.recordsAsTheyAre(restored))(t)
				m.Want(t, count)
				m.Want(t, p.recordsInASandbox(restored))
				restored.DeleteSnapshot(m.ID)
			}
		})
	}
	r.wantClean()
}

// databaseAndItsSnapshots runs a database in a pod until it has snapshots.
func (r *testNode) databaseAndItsSnapshots(fs string) (p *program, all []snapshots.Moment) {
	r.t.Helper()
	v := r.driver.Create(r.t, "pv-"+fs, fs, diskSize)
	v.Publish()
	pod := r.pod(v.Pod)
	p = r.database(pod, v, v)
	all = p.snapshots(v)
	p.stop()
	r.t.Logf("%d records", p.acknowledged())
	r.remove(pod)
	v.Unpublish()
	v.Delete()
	return p, all
}
