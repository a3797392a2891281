//go:build system

package driver_test

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/snapshots"
)

func (v *volume) snapshot(name string) (*csi.Snapshot, error) {
	v.t.Helper()
	reply, err := v.CreateSnapshot(v.t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: v.id})
	return reply.GetSnapshot(), err
}

func (v *volume) mustSnapshot(name string) *csi.Snapshot {
	v.t.Helper()
	made := check.Value(v.snapshot(name))(v.t)
	check.That(v.t, made.GetReadyToUse() && made.GetSourceVolumeId() == v.id && made.GetSizeBytes() >= size && !made.GetCreationTime().AsTime().IsZero(),
		"%v", made)
	return made
}

func (r *testDriver) removeSnapshot(id string) error {
	return check.Err(r.DeleteSnapshot(r.t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id}))
}

func snapshotSource(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id},
	}}
}

// consistent reads what the record of a snapshot says.
func (r *testDriver) consistent(id string) bool {
	r.t.Helper()
	return snapshots.Consistent(r.t, r.data, id)
}

// TestSnapshots restores snapshots of each filesystem on each pool, when the volume has changed and when it has gone.
func TestSnapshots(t *testing.T) {
	for i, pool := range pools {
		r := newDriverOn(t, pool, false)
		for _, fs := range some(2 - i) {
			t.Run(fs+" on "+pool, func(t *testing.T) {
				v := r.volume("v", rig.MountAccess(fs))
				v.up()
				v.put("first")
				first := v.putRandom(mib)
				v.must(v.unpublish, v.unstage)
				one := v.mustSnapshot("one")
				v.must(v.stage, v.publish)
				v.put("second")
				second := v.putRandom(mib)
				v.must(v.unpublish, v.unstage)
				two := v.mustSnapshot("two")
				check.That(t, r.consistent(one.GetSnapshotId()) && two.GetCreationTime().AsTime().After(one.GetCreationTime().AsTime()), "%v, %v", one, two)
				old, young := r.volume("old", rig.MountAccess(fs)), r.volume("young", rig.MountAccess(fs))
				check.Must(t, old.createFrom(snapshotSource(one.GetSnapshotId()), 0))
				v.must(v.stage, v.publish)
				old.must(old.stage, old.publish)
				old.wantKept("first")
				old.wantRandom(first)
				old.put("of the restored one")
				v.wantKept("second")
				v.down()
				r.restart()
				again, err := v.snapshot("two")
				check.That(t, err == nil && again.GetSnapshotId() == two.GetSnapshotId(), "%v, %v", again, err) // it exists, whatever became of its volume
				check.Must(t, young.createFrom(snapshotSource(two.GetSnapshotId()), 2*size))
				check.Must(t, r.removeSnapshot(one.GetSnapshotId()))
				check.Must(t, r.removeSnapshot(two.GetSnapshotId()))
				young.must(young.stage, young.publish)
				young.wantKept("second")
				young.wantRandom(second)
				total := young.bytesOf().GetTotal()
				check.That(t, total >= size*18/10, "the larger one has %d bytes", total)
				young.down()
				old.down()
			})
		}
	}
}

// TestSnapshotIsNoVolume: the id of the one is unknown as the other.
func TestSnapshotIsNoVolume(t *testing.T) {
	r := newDriverOn(t, "xfs", false)
	v, other, clone := r.volume("v", rig.MountAccess("ext4")), r.volume("other", rig.MountAccess("ext4")), r.volume("clone", rig.MountAccess("ext4"))
	v.must(v.create)
	other.must(other.create)
	made := v.mustSnapshot("s")
	check.Code(t, check.Err(other.snapshot("s")), codes.AlreadyExists)
	check.Code(t, check.Err((&volume{testDriver: r, id: "missing"}).snapshot("t")), codes.NotFound)
	check.Code(t, clone.createFrom(snapshotSource(v.id), 0), codes.NotFound)
	check.Code(t, clone.createFrom((&volume{id: made.GetSnapshotId()}).asSource(), 0), codes.NotFound)
	check.Code(t, clone.createFrom(snapshotSource(made.GetSnapshotId()), size-mib), codes.OutOfRange)
	check.Must(t, clone.createFrom(snapshotSource(made.GetSnapshotId()), 0))
	check.Code(t, clone.createFrom(v.asSource(), 0), codes.AlreadyExists)
	as := r.volume("as", rig.MountAccess("ext4"))
	as.id = made.GetSnapshotId()
	check.Code(t, as.stage(), codes.NotFound)
	check.Code(t, as.growController(2*size), codes.NotFound)
	as.must(as.unpublish, as.unstage, as.remove) // there is no such volume
	check.Must(t, check.Err(r.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: made.GetSnapshotId()})))
	check.Code(t, check.Err(r.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: v.id})), codes.NotFound)
	check.Must(t, r.removeSnapshot(v.id)) // there is no such snapshot
	ids := r.volumeIDs()
	check.That(t, len(ids) == 3, "%v", ids)
	check.Must(t, r.removeSnapshot(made.GetSnapshotId()))
	for _, one := range []*volume{v, other, clone} {
		one.must(one.remove)
	}
}

// TestKilledInSnapshot kills at each step of making and removing one.
func TestKilledInSnapshot(t *testing.T) {
	for _, pool := range rig.Sample([]string{"btrfs", "ext4"}, 2) {
		r := newDriverOn(t, pool, false)
		v := r.volume("v", rig.MountAccess("ext4"))
		v.up()
		content := v.putRandom(mib)
		v.must(v.unpublish, v.unstage)
		for _, point := range fillSteps {
			r.killed(point, func() error { _, err := v.snapshot("s"); return err })
			r.wantVolumes(1)
			made := v.mustSnapshot("s")
			restored := r.volume("restored", rig.MountAccess("ext4"))
			restored.upFrom(snapshotSource(made.GetSnapshotId()), 0)
			restored.wantRandom(content)
			restored.down()
			check.Must(t, r.removeSnapshot(made.GetSnapshotId()))
		}
		for _, point := range []string{"driver-recording", "driver-erasing", "driver-image-removed"} {
			made := v.mustSnapshot("s")
			r.killed(point, func() error { return r.removeSnapshot(made.GetSnapshotId()) })
			check.Must(t, r.removeSnapshot(made.GetSnapshotId()))
			r.wantVolumes(1)
		}
		v.must(v.remove)
	}
}
