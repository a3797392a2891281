//go:build system

package containerd

import (
	"fmt"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/database"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
	"github.com/crust-proxy/crust-proxy/test/rig/snapshots"
)

// databases are two: one has its two files on two volumes of its sandbox, and the other one
// has both on the volume of another sandbox.
type databases struct {
	*testNode
	volumes []*csiVolume
	pods    []*cri.Pod
	running []*program
}

func (r *testNode) databases() *databases {
	r.t.Helper()
	d := &databases{testNode: r, volumes: []*csiVolume{
		r.create("one", "ext4", diskSize), r.create("two", "xfs", diskSize), r.create("three", "btrfs", diskSize),
	}}
	d.volumes[1].For(d.volumes[0].Pod)
	for _, v := range d.volumes {
		v.Publish()
	}
	for _, files := range [][]*csiVolume{d.volumes[:2], {d.volumes[2], d.volumes[2]}} {
		pod := r.pod(files[0].Pod)
		d.pods = append(d.pods, pod)
		d.running = append(d.running, r.database(pod, files[0], files[1]))
	}
	return d
}

func (d *databases) wantProgress() {
	d.t.Helper()
	for _, p := range d.running {
		p.wantProgress()
	}
}

func (d *databases) end() {
	d.t.Helper()
	for i, p := range d.running {
		p.stop()
		d.remove(d.pods[i])
	}
	for _, v := range d.volumes {
		v.giveBack()
	}
}

// group makes a group snapshot, and gives the snapshots in the order of the volumes.
func (r *testNode) group(name string, of ...*csiVolume) (id string, members []string, err error) {
	r.t.Helper()
	req := &csi.CreateVolumeGroupSnapshotRequest{Name: name}
	for _, v := range of {
		req.SourceVolumeIds = append(req.SourceVolumeIds, v.ID)
	}
	made, err := r.driver.Group.CreateVolumeGroupSnapshot(r.ctx(), req)
	for _, v := range of {
		for _, s := range made.GetGroupSnapshot().GetSnapshots() {
			if s.GetSourceVolumeId() == v.ID {
				members = append(members, s.GetSnapshotId())
			}
		}
	}
	if err == nil && len(members) != len(of) {
		r.t.Errorf("%v is not of %q", made, req.GetSourceVolumeIds())
	}
	return made.GetGroupSnapshot().GetGroupSnapshotId(), members, err
}

func (r *testNode) removeGroup(id string, members []string) {
	r.t.Helper()
	_, err := r.driver.Group.DeleteVolumeGroupSnapshot(r.ctx(), &csi.DeleteVolumeGroupSnapshotRequest{
		GroupSnapshotId: id, SnapshotIds: members,
	})
	check.Must(r.t, err)
}

// wantGroup looks at the images of a group of databases: all is of one moment.
func (d *databases) wantGroup(members []string) {
	d.t.Helper()
	var dirs []string
	var look func(rest []string)
	look = func(rest []string) {
		if len(rest) == 0 {
			for _, files := range [][]string{dirs[:2], {dirs[2], dirs[2]}} {
				_, err := database.Check(files[0], files[1])
				check.Must(d.t, err)
			}
			return
		}
		if !snapshots.Consistent(d.t, d.driver.Data, rest[0]) {
			d.t.Errorf("%s is not consistent", rest[0])
		}
		check.Must(d.t, snapshots.AsItIs(d.t, snapshots.Image(d.driver.Data, rest[0]), d.volumes[len(dirs)].FS, func(dir string) {
			dirs = append(dirs, dir)
			look(rest[1:])
		}))
	}
	look(members)
}

// TestGroupSnapshotsOfSandboxes takes them of volumes that only two sandboxes have mounted: all
// are frozen together. A record is never on the second volume before the first one.
func TestGroupSnapshotsOfSandboxes(t *testing.T) {
	r := newSnapshotNode(t)
	d := r.databases()
	for n := range snapshots.Seconds() {
		d.wantProgress()
		id, members, err := r.group(fmt.Sprint("g", n), d.volumes...)
		check.Must(t, err)
		d.wantGroup(members)
		r.removeGroup(id, members)
	}
	d.end()
	r.wantClean()
}

// restartDriver kills the driver and starts it with failpoints.
func (r *testNode) restartDriver(failpoints string) {
	r.t.Helper()
	r.driver.Process.Kill()
	check.Must(r.t, r.driver.Process.Launch("CRUST_FAILPOINTS="+failpoints))
	r.driver.Wait(r.t)
}

// TestDriverIsKilledWhileASandboxIsFrozen repeats the call while the volumes are frozen still:
// the driver waits for the end of that, and freezes them again.
func TestDriverIsKilledWhileASandboxIsFrozen(t *testing.T) {
	r := newSnapshotNode(t, "--freeze-limit", "5s")
	d := r.databases()
	for _, point := range []string{"driver-frozen", "driver-taken"} {
		r.restartDriver(point + "=kill")
		_, err := d.volumes[0].snapshot("s")
		r.killedBy(point, err)
		id, err := d.volumes[0].snapshot("s")
		check.Must(t, err)
		if !snapshots.Consistent(t, r.driver.Data, id) {
			t.Errorf("%s: the snapshot is not consistent", point)
		}
		d.volumes[0].removeSnapshot(id)
		d.wantProgress()
	}
	d.end()
	r.wantClean()
}

// killedBy starts the driver again that a failpoint has killed.
func (r *testNode) killedBy(point string, err error) {
	r.t.Helper()
	if err == nil {
		r.t.Fatalf("%s: not hit", point)
	}
	_, err = r.driver.Process.WaitEnd(20 * time.Second)
	check.Must(r.t, err)
	r.restartDriver("")
}
