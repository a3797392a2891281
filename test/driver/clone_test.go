//go:build system

package driver_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// pools are the filesystems for images: the last one has no reflinks.
var pools = []string{"xfs", "btrfs", "ext4"}

// some are the filesystems that are tried on a pool: one, another one on each pool, and in a soak all.
func some(pool int) []string {
	all := []string{"ext4", "xfs", "btrfs"}
	if rig.Soak() {
		return all
	}
	return all[pool : pool+1]
}

func (v *volume) requestFrom(source *csi.VolumeContentSource, bytes int64) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name: v.name, CapacityRange: &csi.CapacityRange{RequiredBytes: bytes},
		VolumeCapabilities: []*csi.VolumeCapability{v.access}, VolumeContentSource: source,
	}
}

func (v *volume) createFrom(source *csi.VolumeContentSource, bytes int64) error {
	reply, err := v.CreateVolume(v.t.Context(), v.requestFrom(source, bytes))
	if err == nil {
		v.id = reply.GetVolume().GetVolumeId()
	}
	return err
}

func (v *volume) asSource() *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.id},
	}}
}

// putRandom writes a file that is compared byte by byte.
func (v *volume) putRandom(bytes int64) []byte {
	v.t.Helper()
	content := make([]byte, bytes)
	_, _ = rand.Read(content) // it never fails
	check.Must(v.t, os.WriteFile(v.target+"/random", content, 0o600))
	return content
}

func (v *volume) wantRandom(content []byte) {
	v.t.Helper()
	got, err := os.ReadFile(v.target + "/random")
	check.That(v.t, err == nil && bytes.Equal(got, content), "%s: %d bytes that are not those written: %v", v.name, len(got), err)
}

// TestClones clones each filesystem on each pool, as large as the source and larger. All
// are mounted at once: a clone has the UUID of its source.
func TestClones(t *testing.T) {
	for i, pool := range pools {
		r := newDriverOn(t, pool, false)
		for _, fs := range some(i) {
			t.Run(fs+" on "+pool, func(t *testing.T) {
				v := r.volume("original", rig.MountAccess(fs))
				v.up()
				v.put("of the original")
				content := v.putRandom(8 * mib)
				v.must(v.unpublish, v.unstage)
				same, larger := r.volume("same", rig.MountAccess(fs)), r.volume("larger", rig.MountAccess(fs))
				check.Must(t, same.createFrom(v.asSource(), 0))
				check.Must(t, larger.createFrom(v.asSource(), 2*size))
				v.must(v.stage, v.publish)
				for _, clone := range []*volume{same, larger} {
					clone.must(clone.stage, clone.publish)
					clone.wantKept("of the original")
					clone.wantRandom(content)
					clone.put("of the clone")
				}
				v.wantKept("of the original")
				total := same.bytesOf().GetTotal()
				check.That(t, total <= size, "the clone has %d bytes", total)
				total = larger.bytesOf().GetTotal()
				check.That(t, total >= size*18/10, "the larger clone has %d bytes", total)
				v.down()
				check.Must(t, same.createFrom(v.asSource(), 0)) // it exists, whatever became of its source
				same.down()
				larger.down()
			})
		}
	}
}

// TestCloneErrors has the errors of CSI's table.
func TestCloneErrors(t *testing.T) {
	r := newDriverOn(t, "xfs", false)
	v, other, clone := r.volume("v", rig.MountAccess("xfs")), r.volume("other", rig.MountAccess("ext4")), r.volume("clone", rig.MountAccess("xfs"))
	v.must(v.create, v.stage, v.unstage)
	other.must(other.create)
	missing := (&volume{id: "missing"}).asSource()
	check.Code(t, clone.createFrom(missing, 0), codes.NotFound)
	check.Code(t, clone.createFrom(&csi.VolumeContentSource{}, 0), codes.InvalidArgument)
	check.Code(t, clone.createFrom(v.asSource(), size-mib), codes.OutOfRange)
	clone.access = rig.MountAccess("ext4")
	check.Code(t, clone.createFrom(v.asSource(), 0), codes.InvalidArgument)
	clone.access = rig.BlockAccess()
	check.Must(t, clone.createFrom(v.asSource(), 0))
	check.Code(t, clone.createFrom(other.asSource(), 0), codes.AlreadyExists)
	check.Code(t, clone.createFrom(nil, 0), codes.AlreadyExists)
	check.Code(t, other.createFrom(v.asSource(), 0), codes.AlreadyExists)
	reply, err := r.CreateVolume(t.Context(), clone.requestFrom(v.asSource(), 0))
	check.That(t, err == nil && reply.GetVolume().GetContentSource().GetVolume().GetVolumeId() == v.id, "%v, %v", reply, err)
	for _, one := range []*volume{clone, v, other} {
		one.must(one.remove)
	}
}

func (r *testDriver) volumeIDs() (ids []string) {
	r.t.Helper()
	reply := check.Value(r.ListVolumes(r.t.Context(), &csi.ListVolumesRequest{}))(r.t)
	for _, entry := range reply.GetEntries() {
		ids = append(ids, entry.GetVolume().GetVolumeId())
	}
	return ids
}

// TestVolumeInUseIsNotCopied: what is written meanwhile would be there in part.
func TestVolumeInUseIsNotCopied(t *testing.T) {
	r := newDriverOn(t, "ext4", false)
	v, clone := r.volume("v", rig.MountAccess("ext4")), r.volume("clone", rig.MountAccess("ext4"))
	v.up()
	check.Code(t, clone.createFrom(v.asSource(), 0), codes.FailedPrecondition)
	v.must(v.unpublish, v.unstage)
	check.Must(t, clone.createFrom(v.asSource(), 0))
	clone.must(clone.remove)
	v.must(v.remove)
}

// TestClonesNeedNoRoom: without --capacity a clone, a snapshot and a group need the room of what
// is copied, not that of the volume.
func TestClonesNeedNoRoom(t *testing.T) {
	for _, pool := range []string{"xfs", "ext4"} {
		r := layOut(t, "")
		r.data = rig.Pool(t, pool, rig.Disk(t, 600*mib, pool))
		r.prepare()
		r.start()
		v, clone, blank := r.volume("v", rig.MountAccess("ext4")), r.volume("clone", rig.MountAccess("ext4")), r.volume("blank", rig.MountAccess("ext4"))
		v.must(v.create)
		filler := check.Value(os.Create(r.data + "/filler"))(t)
		check.Must(t, errors.Join(unix.Fallocate(int(filler.Fd()), 0, 0, 300*mib), filler.Sync(), filler.Close()))
		check.Code(t, blank.create(), codes.ResourceExhausted)
		check.Code(t, clone.createFrom(v.asSource(), 2*size), codes.ResourceExhausted)
		check.Must(t, clone.createFrom(v.asSource(), 0))
		made := v.mustSnapshot("s").GetSnapshotId()
		group := check.Value(r.group("g", v, clone))(t)
		check.Must(t, errors.Join(r.removeGroup(group.GetGroupSnapshotId()), r.removeSnapshot(made)))
		v.must(v.remove, clone.remove)
	}
}

// TestPodsLeaveAFullDisk: else the volumes that fill it could never be deleted.
func TestPodsLeaveAFullDisk(t *testing.T) {
	for _, pool := range rig.Sample([]string{"ext4", "xfs"}, 2) {
		t.Run(pool, func(t *testing.T) {
			r := layOut(t, "")
			r.data = rig.Pool(t, pool, rig.Disk(t, 400*mib, pool))
			r.prepare("--capacity", "1Ti")
			r.start()
			all := []*volume{r.volume("v", rig.MountAccess("ext4")), r.volume("w", rig.MountAccess("ext4"))}
			for _, v := range all {
				v.up()
			}
			fillUp(t, r.data+"/filler")
			another := r.volume("another", rig.MountAccess("ext4"))
			check.Code(t, another.create(), codes.ResourceExhausted)
			for _, v := range all {
				v.must(v.unpublish, v.unstage)
			}
			r.restart()
			for _, v := range all {
				v.must(v.remove)
			}
		})
	}
}

// fillUp makes a file that takes all room of its disk.
func fillUp(t *testing.T, path string) {
	t.Helper()
	file := check.Value(os.Create(path))(t)
	end := int64(0)
	for step := 64 * mib; step >= 512; {
		if unix.Fallocate(int(file.Fd()), 0, end, step) == nil {
			end += step
		} else {
			step /= 2
		}
	}
	check.Must(t, errors.Join(file.Sync(), file.Close()))
	for i := range 1000 { // what is left is only good for small files
		if os.WriteFile(fmt.Sprintf("%s-%d", path, i), make([]byte, 4096), 0o600) != nil {
			return
		}
	}
	t.Fatal("it is not full")
}

// fillSteps are those of making a volume or a snapshot from another one.
var fillSteps = []string{
	"driver-recording", "driver-recorded", "driver-fill-begun", "driver-filled", "driver-image-made", "driver-recording@2",
}

// TestKilledInClone kills at each step. The same call then succeeds; or it never comes
// again, and the next start has removed all that was begun.
func TestKilledInClone(t *testing.T) {
	for _, pool := range []string{"xfs", "ext4"} {
		r := newDriverOn(t, pool, false)
		v := r.volume("v", rig.MountAccess("ext4"))
		v.up()
		content := v.putRandom(mib)
		v.must(v.unpublish, v.unstage)
		for i, point := range fillSteps {
			for _, abandon := range []bool{false, true} {
				if !rig.Soak() && abandon == (i%2 == 0) == (pool == "xfs") {
					continue
				}
				clone := r.volume("clone", rig.MountAccess("ext4"))
				r.killed(point, func() error { return clone.createFrom(v.asSource(), 0) })
				if abandon {
					r.wantVolumes(1)
					continue
				}
				clone.upFrom(v.asSource(), 0)
				clone.wantRandom(content)
				clone.down()
			}
		}
		v.must(v.remove)
	}
}

// wantVolumes counts records and images.
func (r *testDriver) wantVolumes(n int) {
	r.t.Helper()
	for _, dir := range []string{"/volumes", "/images"} {
		there, err := os.ReadDir(r.data + dir)
		check.That(r.t, err == nil && len(there) == n, "in %s are %v: %v", dir, there, err)
	}
}
