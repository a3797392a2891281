//go:build system

package driver_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

func (v *volume) modify(parameters map[string]string) error {
	return check.Err(v.ControllerModifyVolume(v.t.Context(), &csi.ControllerModifyVolumeRequest{VolumeId: v.id, MutableParameters: parameters}))
}

func directIO(on string) map[string]string { return map[string]string{"directIO": on} }

// loopSays reads an attribute of the one loop device of the driver.
func (r *testDriver) loopSays(attribute string) string {
	r.t.Helper()
	loops := r.loops()
	check.Require(r.t, len(loops) == 1, "attached are %v", loops)
	raw := check.Value(os.ReadFile("/sys/block/" + filepath.Base(loops[0]) + attribute))(r.t)
	return strings.TrimSpace(string(raw))
}

func (r *testDriver) wantDirectIO(want string) {
	r.t.Helper()
	got := r.loopSays("/loop/dio")
	check.That(r.t, got == want, "direct I/O is %s, and not %s", got, want)
}

// TestDirectIO changes the attribute of a VolumeAttributesClass: at once of an attached volume,
// else for the next time. It outlives the driver.
func TestDirectIO(t *testing.T) {
	r := newDriverOn(t, "xfs", false)
	v := r.volume("v", rig.MountAccess("xfs"))
	reply := check.Value(r.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "v", CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapabilities: []*csi.VolumeCapability{v.access},
		MutableParameters: directIO("false"),
	}))(t)
	v.id = reply.GetVolume().GetVolumeId()
	v.must(v.stage, v.publish)
	r.wantDirectIO("0")
	content := v.putRandom(mib)
	for _, one := range []struct{ say, dio string }{{"true", "1"}, {"true", "1"}, {"false", "0"}} {
		check.Must(t, v.modify(directIO(one.say)))
		r.wantDirectIO(one.dio)
		v.wantRandom(content)
	}
	v.must(v.unpublish, v.unstage)
	check.Must(t, v.modify(directIO("true")))
	r.restart()
	v.must(v.stage, v.publish)
	r.wantDirectIO("1")
	for _, wrong := range []map[string]string{directIO("maybe"), {"directIO": "false", "iops": "9"}} {
		check.Code(t, v.modify(wrong), codes.InvalidArgument)
	}
	r.wantDirectIO("1") // nothing of a wrong request is applied
	check.Code(t, (&volume{testDriver: r, id: "missing"}).modify(directIO("true")), codes.NotFound)
	v.wantRandom(content)
	v.down()
}

// TestKilledInModify kills before and after the device has changed.
func TestKilledInModify(t *testing.T) {
	r := newDriverOn(t, "xfs", false)
	v := r.volume("v", rig.MountAccess("ext4"))
	v.up()
	for _, point := range []string{"driver-modified", "driver-recording"} {
		r.killed(point, func() error { return v.modify(directIO("false")) })
		check.Must(t, v.modify(directIO("false")))
		r.wantDirectIO("0")
		check.Must(t, v.modify(directIO("true")))
		r.wantDirectIO("1")
	}
	v.down()
}

// TestLargeSectors has a pool on a disk with sectors of 4096 bytes: loop devices have such ones too, so that direct I/O
// works, and keep them without it. Else an xfs could not be mounted any more.
func TestLargeSectors(t *testing.T) {
	disk := rig.Loop(t, rig.Image(t, poolSize), loopdev.Options{SectorSize: 4096})
	rig.Command(t, "mkfs.xfs", "-q", disk)
	r := layOut(t, "")
	r.data = rig.Pool(t, "xfs", disk)
	r.prepare()
	r.start()
	v := r.volume("v", rig.MountAccess("xfs"))
	v.must(v.create)
	check.Must(t, v.modify(directIO("false")))
	for _, on := range []struct{ say, dio string }{{"false", "0"}, {"true", "1"}, {"false", "0"}} {
		check.Must(t, v.modify(directIO(on.say)))
		v.must(v.stage, v.publish)
		r.wantDirectIO(on.dio)
		sectors := r.loopSays("/queue/logical_block_size")
		check.That(t, sectors == "4096", "with direct I/O %s the sectors have %s bytes", on.say, sectors)
		v.must(v.unpublish, v.unstage)
	}
	v.must(v.remove)
}
