//go:build system

package driver_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

func (r *testDriver) group(name string, of ...*volume) (*csi.VolumeGroupSnapshot, error) {
	r.t.Helper()
	req := &csi.CreateVolumeGroupSnapshotRequest{Name: name}
	for _, v := range of {
		req.SourceVolumeIds = append(req.SourceVolumeIds, v.id)
	}
	reply, err := r.CreateVolumeGroupSnapshot(r.t.Context(), req)
	return reply.GetGroupSnapshot(), err
}

// mustGroup also gives the members in the order of the volumes.
func (r *testDriver) mustGroup(name string, of ...*volume) (*csi.VolumeGroupSnapshot, []*csi.Snapshot) {
	r.t.Helper()
	made := check.Value(r.group(name, of...))(r.t)
	var members []*csi.Snapshot
	for _, v := range of {
		i := slices.IndexFunc(made.GetSnapshots(), func(s *csi.Snapshot) bool { return s.GetSourceVolumeId() == v.id })
		check.Require(r.t, i >= 0, "no snapshot of %s in %v", v.id, made)
		members = append(members, made.GetSnapshots()[i])
	}
	for _, m := range members {
		check.That(r.t, m.GetReadyToUse() && m.GetGroupSnapshotId() == made.GetGroupSnapshotId() && m.GetCreationTime().AsTime().Equal(made.GetCreationTime().AsTime()),
			"%v in %v", m, made)
	}
	check.That(r.t, made.GetReadyToUse() && len(made.GetSnapshots()) == len(of) && !made.GetCreationTime().AsTime().IsZero(), "%v", made)
	return made, members
}

func (r *testDriver) removeGroup(id string, members ...string) error {
	return check.Err(r.DeleteVolumeGroupSnapshot(r.t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: id, SnapshotIds: members}))
}

// TestGroupSnapshots takes groups of two volumes to which somebody writes in turns, and of an
// idle one. Restored, the two are as if the writer had stopped there.
func TestGroupSnapshots(t *testing.T) {
	for _, c := range rig.Sample([]struct{ pool, fs string }{{"btrfs", "xfs"}, {"xfs", "ext4"}, {"xfs", "btrfs"}}, 3) {
		t.Run(c.fs+" on "+c.pool, func(t *testing.T) {
			r := newDriverOn(t, c.pool, false, aMinute...)
			a, b, idle := r.volume("a", rig.MountAccess(c.fs)), r.volume("b", rig.MountAccess("ext4")), r.volume("idle", rig.MountAccess("ext4"))
			a.up()
			b.up()
			idle.must(idle.create)
			stop := write(t, a.target, b.target)
			var groups []*csi.VolumeGroupSnapshot
			for i := range 3 {
				check.Succeeds(t, "a slow machine holds writes too long", func() error {
					err := check.Err(r.group(fmt.Sprint("g", i), a, b, idle))
					check.Require(t, err == nil || status.Code(err) == codes.Aborted, "%v", err)
					return err
				})
				made, members := r.mustGroup(fmt.Sprint("g", i), a, b, idle)
				for _, m := range members {
					check.That(t, r.consistent(m.GetSnapshotId()), "%s in group %d is not consistent", m.GetSourceVolumeId(), i)
				}
				groups = append(groups, made)
			}
			stop()
			for _, made := range groups {
				_, members := r.mustGroup(fmt.Sprint("g", slices.Index(groups, made)), a, b, idle) // it is there
				first, second := r.volume("first", rig.MountAccess(c.fs)), r.volume("second", rig.MountAccess("ext4"))
				first.upFrom(snapshotSource(members[0].GetSnapshotId()), 0)
				second.upFrom(snapshotSource(members[1].GetSnapshotId()), 0)
				wantChain(t, first.target, second.target)
				first.down()
				second.down()
				check.Must(t, r.removeGroup(made.GetGroupSnapshotId()))
			}
			a.down()
			b.down()
			idle.must(idle.remove)
		})
	}
}

// TestGroupErrors has the errors of CSI's tables. What fails leaves nothing.
func TestGroupErrors(t *testing.T) {
	r := newDriverOn(t, "btrfs", false, "--capacity", fmt.Sprint(6*size))
	a, b, c := r.volume("a", rig.MountAccess("ext4")), r.volume("b", rig.MountAccess("ext4")), r.volume("c", rig.MountAccess("ext4"))
	for _, v := range []*volume{a, b, c} {
		v.must(v.create)
	}
	missing := &volume{id: "missing"}
	check.Code(t, check.Err(r.group("g")), codes.InvalidArgument)
	check.Code(t, check.Err(r.group("g", a, missing)), codes.NotFound)
	made, members := r.mustGroup("g", a, b)
	again, _ := r.mustGroup("g", b, a)
	check.That(t, again.GetGroupSnapshotId() == made.GetGroupSnapshotId(), "%v is not %v", again, made)
	check.Code(t, check.Err(r.group("g", a, b, c)), codes.AlreadyExists)
	check.Code(t, check.Err(r.group("more", b, c)), codes.ResourceExhausted) // there is room for one of them
	r.wantVolumes(5)
	ids := []string{members[1].GetSnapshotId(), members[0].GetSnapshotId()}
	check.Code(t, r.removeSnapshot(ids[0]), codes.InvalidArgument)
	check.Code(t, r.removeGroup(made.GetGroupSnapshotId(), ids[0]), codes.InvalidArgument)
	get := func(id string, members ...string) error {
		return check.Err(r.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id, SnapshotIds: members}))
	}
	check.Code(t, get(made.GetGroupSnapshotId(), ids[0], "other"), codes.InvalidArgument)
	check.Must(t, get(made.GetGroupSnapshotId(), ids...))
	list, err := r.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SourceVolumeId: a.id})
	check.That(t, err == nil && len(list.GetEntries()) == 1 && list.GetEntries()[0].GetSnapshot().GetGroupSnapshotId() == made.GetGroupSnapshotId(),
		"%v, %v", list, err)
	check.Must(t, r.removeGroup(made.GetGroupSnapshotId(), ids...))
	check.Must(t, r.removeGroup(made.GetGroupSnapshotId(), ids...))
	check.Code(t, get(made.GetGroupSnapshotId()), codes.NotFound)
	r.wantVolumes(3)
	for _, v := range []*volume{a, b, c} {
		v.must(v.remove)
	}
}

// TestGroupIsOfOneMoment: of two volumes that cannot be frozen there is no group, and of two
// that were frozen for a part of the time neither. With one of them there is.
func TestGroupIsOfOneMoment(t *testing.T) {
	r := newDriverOn(t, "xfs", false, "--freeze-limit", "10s")
	fs, more, device, other := r.volume("fs", rig.MountAccess("ext4")), r.volume("more", rig.MountAccess("ext4")), r.volume("device", rig.BlockAccess()), r.volume("other", rig.BlockAccess())
	all := []*volume{fs, more, device, other}
	for _, v := range all {
		v.up()
	}
	check.Code(t, check.Err(r.group("g", fs, device, other)), codes.FailedPrecondition)
	r.restart("CRUST_FAILPOINTS=driver-taken=sleep:13s")
	check.Code(t, check.Err(r.group("g", fs, more)), codes.Aborted)
	r.restart()
	r.wantVolumes(len(all))
	fs.wantWrites()
	made, members := r.mustGroup("g", fs, device)
	check.That(t, r.consistent(members[0].GetSnapshotId()) && !r.consistent(members[1].GetSnapshotId()), "%v", members)
	check.Must(t, r.removeGroup(made.GetGroupSnapshotId()))
	for _, v := range all {
		v.down()
	}
}

// TestKilledInGroup kills at each step of making and removing a group. The next start leaves
// all of it or nothing, and the same call then succeeds.
func TestKilledInGroup(t *testing.T) {
	for i, pool := range []string{"xfs", "ext4"} {
		r := newDriverOn(t, pool, false, "--freeze-limit", "5s") // which is waited out after a kill
		a, b := r.volume("a", rig.MountAccess("ext4")), r.volume("b", rig.MountAccess("ext4"))
		a.up()
		b.up()
		content := b.putRandom(mib)
		if pool == "ext4" { // no volume in use can be copied
			a.must(a.unpublish, a.unstage)
			b.must(b.unpublish, b.unstage)
		}
		for j, abandon := range []bool{false, true} {
			if !rig.Soak() && i != j {
				continue
			}
			for _, point := range groupSteps {
				r.killed(point, func() error { _, err := r.group("g", a, b); return err })
				r.wantAllOrNone(2, point)
				if abandon {
					r.wantNoGroup(a, b)
					continue
				}
				made, members := r.mustGroup("g", a, b)
				restored := r.volume("restored", rig.MountAccess("ext4"))
				restored.upFrom(snapshotSource(members[1].GetSnapshotId()), 0)
				restored.wantRandom(content)
				restored.down()
				check.Must(t, r.removeGroup(made.GetGroupSnapshotId()))
				r.wantVolumes(2)
			}
			for _, point := range []string{
				"driver-recording", "driver-group-erasing", "driver-recording@2", "driver-image-removed", "driver-erasing@2",
				"driver-image-removed@2", "driver-group-emptied",
			} {
				made, _ := r.mustGroup("g", a, b)
				r.killed(point, func() error { return r.removeGroup(made.GetGroupSnapshotId()) })
				r.wantAllOrNone(2, point)
				if !abandon || point == "driver-recording" { // the intent was not on record
					check.Must(t, r.removeGroup(made.GetGroupSnapshotId()))
				}
				r.wantVolumes(2)
			}
		}
		a.down()
		b.down()
	}
}

// groupSteps are those of making a group of two volumes.
var groupSteps = []string{
	"driver-recording", "driver-group-recorded", "driver-recording@2", "driver-recorded", "driver-recorded@2", "driver-fill-begun",
	"driver-frozen", "driver-taken", "driver-filled", "driver-recording@4", "driver-image-made", "driver-recording@6", "driver-group-made",
	"driver-recording@7", "driver-recording@8",
}

// wantAllOrNone fails where a part of a group is there.
func (r *testDriver) wantAllOrNone(members int, point string) {
	r.t.Helper()
	reply, err := r.ListSnapshots(r.t.Context(), &csi.ListSnapshotsRequest{})
	n := len(reply.GetEntries())
	check.That(r.t, err == nil && (n == 0 || n == members), "killed at %s: %d snapshots of %d are left: %v", point, n, members, err)
}

// wantNoGroup removes the group of volumes if it is there.
func (r *testDriver) wantNoGroup(volumes ...*volume) {
	r.t.Helper()
	reply := check.Value(r.ListSnapshots(r.t.Context(), &csi.ListSnapshotsRequest{}))(r.t)
	for _, entry := range reply.GetEntries() {
		check.Must(r.t, r.removeGroup(entry.GetSnapshot().GetGroupSnapshotId()))
	}
	r.wantVolumes(len(volumes))
}
