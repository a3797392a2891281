//go:build system

package driver_test

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestKilledAnywhere kills the driver at each step of a volume's life; the same call then succeeds after a restart, and
// nothing is left in the end. With undo the life is abandoned there instead, as a CO does that never calls again.
func TestKilledAnywhere(t *testing.T) {
	steps := []struct {
		point string
		call  string // the call in which it dies
	}{
		{"driver-recording", "create"}, {"driver-recorded", "create"}, {"driver-image-made", "create"}, {"driver-recording@2", "create"},
		{"driver-recording", "stage"}, {"driver-stage-recorded", "stage"}, {"driver-attached", "stage"}, {"driver-mounted", "stage"},
		{"driver-recording", "publish"}, {"driver-publish-recorded", "publish"}, {"driver-published", "publish"}, {"driver-mounted", "publish"},
		{"driver-target-cleared", "unpublish"}, {"driver-recording", "unpublish"},
		{"driver-unmounted", "unstage"}, {"driver-detached", "unstage"}, {"driver-recording", "unstage"},
		{"driver-recording", "remove"}, {"driver-erasing", "remove"}, {"driver-image-removed", "remove"},
	}
	for _, native := range []bool{false, true} {
		r := newDriver(t, native)
		for i, step := range steps {
			// A native driver mounts at publish.
			if strings.HasPrefix(step.point, "driver-mounted") && native != (step.call == "publish") {
				continue
			}
			for _, abandon := range []bool{false, true} {
				// Each step is tried in one of the four ways, and in a soak in all.
				if turn := i % 4; rig.Soak() || native == (turn > 1) && abandon == (turn%2 == 1) || step.point == "driver-mounted" && !abandon {
					killedAt(t, r, step.point, step.call, abandon)
				}
			}
		}
	}
}

func killedAt(t *testing.T, r *testDriver, point, call string, abandon bool) {
	t.Helper()
	v := r.volume("v", rig.MountAccess("ext4"))
	life := []struct {
		name string
		do   func() error
	}{
		{"create", v.create}, {"stage", v.stage}, {"publish", v.publish}, {"unpublish", v.unpublish}, {"unstage", v.unstage}, {"remove", v.remove},
	}
	for i, one := range life {
		if one.name == call {
			id := v.id
			r.restart("CRUST_FAILPOINTS=" + point + "=kill")
			check.Require(t, one.do() != nil, "%s in %s: not hit", point, call)
			v.id = id
			r.wait()
			r.start()
			if abandon && i < 3 {
				break
			}
		}
		err := one.do()
		check.Require(t, err == nil, "killed at %s in %s: %s: %v", point, call, one.name, err)
		if one.name == "publish" {
			v.put(point)
			v.must(v.stage, v.publish) // a kubelet that restarts says it all again
			v.wantKept(point)
		}
	}
	if abandon && v.id == "" { // the id was never answered
		v.must(v.create)
	}
	v.down()
}

// TestKilledInExpand kills between record, image and answer, and when the loop device has grown and
// its filesystem not yet.
func TestKilledInExpand(t *testing.T) {
	r := newDriver(t, false)
	v := r.volume("v", rig.MountAccess("xfs"))
	v.up()
	v.put("data")
	for i, point := range []string{"driver-recording", "driver-expand-recorded"} {
		bytes := size * int64(i+2)
		r.restart("CRUST_FAILPOINTS=" + point + "=kill")
		before := v.bytesOf().GetTotal()
		_ = v.growController(bytes)
		r.wait()
		r.start()
		v.grow(bytes)
		check.Must(t, v.growNode(v.staging, bytes))
		after := v.bytesOf().GetTotal()
		check.That(t, after >= before+size/2, "%s: from %d to %d", point, before, after)
		v.wantKept("data")
	}
	v.grow(4 * size)
	r.killed("driver-devices-grown", func() error { return v.growNode(v.target, 4*size) })
	check.Must(t, v.growNode(v.target, 4*size))
	total := v.bytesOf().GetTotal()
	check.That(t, total >= size*38/10, "it has %d bytes", total)
	v.wantKept("data")
	v.down()
}

// TestKilledInReadOnlyPublish: the pod cannot write, also when the publish comes again.
func TestKilledInReadOnlyPublish(t *testing.T) {
	r := newDriver(t, false)
	v := r.volume("v", rig.MountAccess("ext4"))
	v.must(v.create, v.stage)
	request := v.request()
	request.Readonly = true
	publish := func() error { return check.Err(r.NodePublishVolume(t.Context(), request)) }
	r.killed("driver-bind-made", publish)
	// After a final code kubelet would undo nothing, and what was begun is there.
	check.Must(t, errors.Join(os.Remove(v.target), os.WriteFile(v.target, nil, 0o600)))
	check.Code(t, publish(), codes.Aborted)
	check.Must(t, os.Remove(v.target))
	check.Must(t, publish())
	check.Is(t, os.WriteFile(v.target+"/x", nil, 0o600), unix.EROFS)
	v.down()
}

// TestKilledBeforeGrowth: a clone that is larger than its source has a filesystem as large.
func TestKilledBeforeGrowth(t *testing.T) {
	r := newDriver(t, false)
	v, clone := r.volume("v", rig.MountAccess("xfs")), r.volume("clone", rig.MountAccess("xfs"))
	v.must(v.create, v.stage, v.unstage)
	check.Must(t, clone.createFrom(v.asSource(), 2*size))
	r.killed("driver-mounted", func() error { return clone.stage() })
	clone.must(clone.stage, clone.publish)
	total := clone.bytesOf().GetTotal()
	check.That(t, total >= size*18/10, "it has %d bytes", total)
	clone.down()
	v.must(v.remove)
}

// TestKilledInDeferredPublish kills when the filesystem was made, and that is not on record.
func TestKilledInDeferredPublish(t *testing.T) {
	r := newDriver(t, true)
	v := r.volume("v", rig.MountAccess("ext4"))
	v.must(v.create, v.stage)
	for _, point := range []string{"driver-prepared", "driver-recording@2"} {
		r.killed(point, func() error { _, err := v.publishDeferred(false); return err })
		v.must(v.unpublish)
	}
	check.Must(t, check.Err(v.publishDeferred(false)))
	v.down()
}

// TestEveryStepIsKilledAt compares the failpoints of the driver with those of these tests.
func TestEveryStepIsKilledAt(t *testing.T) {
	read := func(pattern string) (all string) {
		paths := check.Value(filepath.Glob(pattern))(t)
		for _, path := range paths {
			all += string(check.Value(os.ReadFile(path))(t))
		}
		return all
	}
	tests := read("*_test.go")
	points := regexp.MustCompile(`failpoint\.Hit\("([^"]+)"\)`).FindAllStringSubmatch(read("../../reference/driver/*.go"), -1)
	check.That(t, len(points) >= 20, "only %d failpoints were found", len(points))
	for _, point := range points {
		check.That(t, regexp.MustCompile(`[="]`+point[1]+`["@=]`).MatchString(tests), "nothing is killed at %s", point[1])
	}
}

// TestRecordsOfAnotherBoot shows that what was staged before a reboot is not
// taken for staged now, and that the data is.
func TestRecordsOfAnotherBoot(t *testing.T) {
	r := newDriver(t, false)
	v := r.volume("v", rig.MountAccess("ext4"))
	v.up()
	v.put("data")
	r.process.Kill()
	r.pretendReboot()
	r.start()
	v.must(v.stage, v.publish)
	v.wantKept("data")
	r.process.Kill()
	r.pretendReboot()
	r.start()
	v.down() // kubelet may also only clean up
}

// pretendReboot takes away what a reboot does: mounts and loop devices; and gives the records the id of another boot.
func (r *testDriver) pretendReboot() {
	r.t.Helper()
	rig.UnmountAll(r.t, r.dir)
	for _, loop := range r.loops() {
		check.Must(r.t, loopdev.Detach(loop))
	}
	rig.OfAnotherBoot(r.t, r.data)
}

// TestADeviceLeftReadOnly: the kernel keeps that of a loop device whose backing has gone, as
// when a node's claims were killed with all that could take them back.
func TestADeviceLeftReadOnly(t *testing.T) {
	image := rig.Image(t, mib)
	for range 10 { // others may be faster
		left := check.Value(loopdev.Attach(image, loopdev.Options{}))(t)
		device := check.Value(os.Open(left))(t)
		check.Must(t, unix.IoctlSetPointerInt(int(device.Fd()), unix.BLKROSET, 1))
		check.Must(t, errors.Join(device.Close(), loopdev.Detach(left)))
		next := rig.Loop(t, image, loopdev.Options{})
		if next != left {
			continue
		}
		raw, err := os.ReadFile("/sys/block/" + filepath.Base(next) + "/ro")
		check.That(t, err == nil && string(raw) == "0\n", "the device is read-only: %q, %v", raw, err)
		return
	}
	t.Error("the device was never ours again")
}

// TestADeviceThatIsAnothersByNow is not detached: numbers of loop devices are used again.
func TestADeviceThatIsAnothersByNow(t *testing.T) {
	image := rig.Image(t, mib)
	theirs := rig.Loop(t, rig.Image(t, mib), loopdev.Options{})
	check.Must(t, loopdev.DetachFrom(image, theirs))
	check.That(t, len(rig.Loops("")[theirs]) != 0, "the device of another file is gone")
	ours := rig.Loop(t, image, loopdev.Options{})
	check.Must(t, loopdev.DetachFrom(image, ours))
	check.Empty(t, rig.LoopsLeft(image), "still there")
}
