//go:build system

package driver_test

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// put writes content that must still be there later.
func (v *volume) put(content string) {
	v.t.Helper()
	check.Must(v.t, os.WriteFile(v.target+"/kept", []byte(content), 0o600))
}

func (v *volume) wantKept(content string) {
	v.t.Helper()
	got, err := os.ReadFile(v.target + "/kept")
	check.That(v.t, err == nil && string(got) == content, "kept %q: %v", got, err)
}

// bytesOf is the size of a published filesystem, or block device, by the stats.
func (v *volume) bytesOf() *csi.VolumeUsage {
	v.t.Helper()
	reply := check.Value(v.NodeGetVolumeStats(v.t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: v.target}))(v.t)
	v.wantHealth(csi.VolumeHealthErrorType_UNKNOWN_VOLUME_HEALTH_TYPE, "")
	return reply.GetUsage()[0]
}

func (v *volume) growController(bytes int64) error {
	reply, err := v.ControllerExpandVolume(v.t.Context(), &csi.ControllerExpandVolumeRequest{
		VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: bytes},
	})
	if err == nil && (reply.GetCapacityBytes() != bytes || !reply.GetNodeExpansionRequired()) {
		err = fmt.Errorf("answered %v", reply)
	}
	return err
}

func (v *volume) grow(bytes int64) {
	v.t.Helper()
	check.Must(v.t, v.growController(bytes))
}

func (v *volume) growNode(path string, bytes int64) error {
	_, err := v.NodeExpandVolume(v.t.Context(), &csi.NodeExpandVolumeRequest{
		VolumeId: v.id, VolumePath: path, StagingTargetPath: v.staging, VolumeCapability: v.access,
		CapacityRange: &csi.CapacityRange{RequiredBytes: bytes},
	})
	return err
}

// growOnline grows a mounted filesystem. For ext4 that takes a capability of the
// driver; without it the next stage does.
func growOnline(t *testing.T, v *volume, bytes int64) {
	t.Helper()
	err := v.growNode(v.target, bytes)
	if err == nil {
		return
	}
	check.Require(t, !rig.MayGrow(t, v.access.GetMount().GetFsType()), "%v", err)
	t.Log("ext4 grows offline here: root has no CAP_SYS_RESOURCE")
	v.must(v.unpublish, v.unstage, v.stage, v.publish)
}

// TestFilesystemThatCannotBeSeen: a blkid that finds nothing, as if it could not read the device, costs no data.
func TestFilesystemThatCannotBeSeen(t *testing.T) {
	blind := t.TempDir()
	check.Must(t, os.WriteFile(blind+"/blkid", []byte("#!/bin/sh\nexit 2\n"), 0o755)) //nolint:gosec // a program
	for _, native := range []bool{false, true} {
		r := newDriver(t, native)
		for _, fs := range []string{"ext4", "xfs", "btrfs"} {
			v := r.volume(fs, rig.MountAccess(fs))
			v.up()
			v.put("data")
			v.must(v.unpublish, v.unstage)
			r.restart("PATH=" + blind + ":" + os.Getenv("PATH"))
			v.must(v.stage, v.publish)
			v.wantKept("data")
			v.down()
			r.restart()
		}
	}
}

// TestGrowth grows each filesystem online and offline, plain and native.
func TestGrowth(t *testing.T) {
	for _, native := range []bool{false, true} {
		r := newDriver(t, native)
		for _, fs := range []string{"ext4", "xfs", "btrfs"} {
			v := r.volume(fs, rig.MountAccess(fs))
			v.up()
			v.put("data")
			before := v.bytesOf()
			check.That(t, before.GetUsed()+before.GetAvailable() <= before.GetTotal() && before.GetTotal() <= size, "%s: %v", fs, before)
			check.Code(t, v.growNode(v.target, 2*size), codes.OutOfRange) // not without the controller
			v.grow(2 * size)
			growOnline(t, v, 2*size)
			online := v.bytesOf()
			check.That(t, online.GetTotal() >= before.GetTotal()+size*8/10, "%s: online from %d to %d", fs, before.GetTotal(), online.GetTotal())
			v.wantKept("data")
			v.must(v.unpublish, v.unstage)
			v.grow(4 * size)
			v.must(v.stage, v.publish)
			offline := v.bytesOf()
			check.That(t, offline.GetTotal() >= before.GetTotal()+3*size*8/10, "%s: offline from %d to %d", fs, before.GetTotal(), offline.GetTotal())
			v.wantKept("data")
			v.down()
		}
	}
}

func TestBlock(t *testing.T) {
	r := newDriver(t, false)
	v := r.volume("block", rig.BlockAccess())
	v.up()
	v.must(v.publish)
	device := check.Value(os.OpenFile(v.target, os.O_RDWR, 0))(t)
	check.Must(t, check.Err(device.WriteAt([]byte("raw"), 4096)))
	v.grow(2 * size)
	check.Must(t, v.growNode(v.target, 2*size))
	end, err := device.Seek(0, 2)
	check.That(t, err == nil && end == 2*size, "the device has %d bytes: %v", end, err)
	check.Must(t, device.Close())
	usage := v.bytesOf()
	check.That(t, usage.GetTotal() == 2*size, "usage %v", usage)

	// A second, read-only publish gets a device that cannot be written to.
	reader := *v
	reader.target += "-reader"
	request := reader.request()
	request.Readonly = true
	for range 2 {
		check.Must(t, check.Err(r.NodePublishVolume(t.Context(), request)))
	}
	if f, err := os.OpenFile(reader.target, os.O_RDWR, 0); err == nil {
		_, err = f.WriteAt([]byte("x"), 0)
		_ = f.Close()
		check.That(t, err != nil, "a read-only device was written to")
	}
	n := len(r.loops())
	check.That(t, n == 2, "%d loop devices", n)
	reader.must(reader.unpublish)
	check.Eventually(t, "the reader's loop device has gone", func() bool { return len(r.loops()) == 1 })
	check.Code(t, v.unstage(), codes.FailedPrecondition) // still published
	v.must(v.unpublish)
	check.Code(t, v.remove(), codes.FailedPrecondition) // still attached
	v.must(v.unstage, v.stage, v.publish)
	raw := make([]byte, 3)
	device = check.Value(os.Open(v.target))(t)
	_, err = device.ReadAt(raw, 4096)
	check.That(t, err == nil && string(raw) == "raw", "%q, %v", raw, err)
	_ = device.Close()
	v.down()
}

func TestReadOnlyAndSecondPod(t *testing.T) {
	r := newDriver(t, false)
	v := r.volume("shared", rig.MountAccess("ext4"))
	v.access.AccessMode.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	v.up()
	v.put("data")
	second := *v
	second.target += "-2"
	request := second.request()
	request.Readonly = true
	check.Must(t, check.Err(r.NodePublishVolume(t.Context(), request)))
	second.wantKept("data")
	check.That(t, os.WriteFile(second.target+"/x", nil, 0o600) != nil, "a read-only publish was written to")
	v.put("data") // the first still writes
	check.Code(t, second.publish(), codes.AlreadyExists)
	second.must(second.unpublish, second.unpublish)
	v.must(v.unpublish)
	reader := *v
	reader.access = rig.MountAccess("ext4")
	reader.access.AccessMode.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
	check.Code(t, reader.stage(), codes.AlreadyExists)
	v.must(v.unstage)
	reader.must(reader.stage, reader.publish)
	reader.wantKept("data")
	check.That(t, os.WriteFile(reader.target+"/x", nil, 0o600) != nil, "a volume staged for reading was written to")
	reader.down()
}

func TestEphemeral(t *testing.T) {
	for _, native := range []bool{false, true} {
		r := newDriver(t, native)
		v := r.volume("inline", rig.MountAccess("ext4"))
		v.id, v.staging = "csi-0123", ""
		readOnly := false
		publish := func(attributes map[string]string) error {
			request := v.request()
			request.VolumeContext = map[string]string{"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.name": "p"}
			maps.Copy(request.VolumeContext, attributes)
			request.Readonly = readOnly
			return check.Err(r.NodePublishVolume(t.Context(), request))
		}
		check.Code(t, publish(map[string]string{"size": "lots"}), codes.InvalidArgument)
		check.Code(t, publish(map[string]string{"colour": "red"}), codes.InvalidArgument)
		for range 2 {
			check.Must(t, publish(map[string]string{"size": "64Mi"}))
		}
		v.put("x")
		total := v.bytesOf().GetTotal()
		check.That(t, total <= 64*mib && total >= 40*mib, "%d bytes", total)
		foreign := r.volume("foreign", v.access)
		foreign.id, foreign.staging = "csi-4567", ""
		check.Must(t, os.Mkdir(foreign.target, 0o750))
		check.Must(t, unix.Mount("tmpfs", foreign.target, "tmpfs", 0, ""))
		request := foreign.request()
		request.VolumeContext = map[string]string{"csi.storage.k8s.io/ephemeral": "true"}
		check.Code(t, check.Err(r.NodePublishVolume(t.Context(), request)), codes.FailedPrecondition)
		r.wantVolumes(1)
		check.Must(t, errors.Join(unix.Unmount(foreign.target, 0), os.Remove(foreign.target)))
		list, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		check.That(t, err == nil && len(list.GetEntries()) == 0, "%v, %v", list, err)
		r.restart()
		v.wantKept("x")
		v.must(v.unpublish, v.unpublish)
		readOnly = true
		for range 2 {
			check.Must(t, publish(nil))
		}
		check.Is(t, os.WriteFile(v.target+"/x", nil, 0o600), unix.EROFS)
		v.must(v.unpublish)
	}
}

func TestForeignThingsStay(t *testing.T) {
	r := newDriver(t, false)
	v := r.volume("v", rig.MountAccess("ext4"))
	v.must(v.create, v.stage)
	check.Must(t, os.Mkdir(v.target, 0o750))
	check.Must(t, unix.Mount("tmpfs", v.target, "tmpfs", 0, ""))
	v.put("not ours")
	check.Code(t, v.publish(), codes.FailedPrecondition)
	v.must(v.unpublish) // it is not published there
	v.wantKept("not ours")
	check.Must(t, unix.Unmount(v.target, 0))
	// A device with another filesystem is never formatted.
	v.must(v.unstage)
	other := *v
	other.access = rig.MountAccess("xfs")
	check.Code(t, other.stage(), codes.FailedPrecondition)
	check.Empty(t, rig.LoopsLeft(r.data+"/images/"), "loop devices after a stage that failed")
	v.must(v.stage, v.publish)
	v.down()
	// Unknown volumes and places are fine to undo.
	unknown := r.volume("unknown", rig.MountAccess("ext4"))
	unknown.id = "../../etc/passwd"
	unknown.must(unknown.unpublish, unknown.unstage, unknown.remove)
	check.Code(t, unknown.stage(), codes.NotFound)
}

// TestPagination has what csi-sanity has switched off.
func TestPagination(t *testing.T) {
	r := newDriver(t, false)
	r.leaves = true
	var all []*volume
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		v := r.volume(name, rig.MountAccess(""))
		v.must(v.create)
		all = append(all, v)
	}
	var seen []string
	token := ""
	for page := 0; ; page++ {
		reply := check.Value(r.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 2, StartingToken: token}))(t)
		for _, entry := range reply.GetEntries() {
			seen = append(seen, entry.GetVolume().GetVolumeId())
		}
		if token = reply.GetNextToken(); token == "" {
			break
		}
		if page == 0 { // the last of a page goes
			for _, v := range all {
				if v.id == seen[len(seen)-1] {
					v.must(v.remove)
				}
			}
		}
	}
	slices.Sort(seen)
	check.That(t, len(slices.Compact(seen)) == 5, "seen: %v", seen)
	// A record that cannot be read costs its own volume only.
	records, _ := filepath.Glob(r.data + "/volumes/*.json")
	check.Must(t, os.WriteFile(records[0], []byte("{"), 0o600))
	r.restart()
	list, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	check.That(t, err == nil && len(list.GetEntries()) == 3, "%v, %v", list.GetEntries(), err)
}

// TestLargerThanAnyFile: a size that the filesystem of the images cannot have changes nothing.
func TestLargerThanAnyFile(t *testing.T) {
	const tooLarge = 17 << 40
	r := newDriverOn(t, "ext4", false, "--capacity", "1024Ti")
	v := r.volume("v", rig.MountAccess("ext4"))
	check.Code(t, v.createFrom(nil, tooLarge), codes.OutOfRange)
	r.wantNothing()
	v.must(v.create)
	check.Code(t, v.growController(tooLarge), codes.OutOfRange)
	v.up()
	v.grow(2 * size)
	v.down()
}

func TestStopsInOrder(t *testing.T) {
	r := newDriver(t, false)
	check.Must(t, r.process.Signal(unix.SIGTERM))
	check.Equal(t, r.wait(), 0, "exit code")
	check.Fails(t, check.Err(os.Lstat(r.socket()))) // or the socket is still there
	out, err := exec.Command(rig.Program(t, "crust-driver"), "--version").Output()
	check.That(t, err == nil && len(out) >= 2, "%q, %v", out, err)
}

// TestMountFlagsStayOut: a flag may hold a secret.
func TestMountFlagsStayOut(t *testing.T) {
	r := newDriver(t, false)
	v := r.volume("v", rig.MountAccess("ext4"))
	v.access.GetMount().MountFlags = []string{"password=hunter2"}
	v.must(v.create)
	err := v.stage()
	check.That(t, err != nil && !strings.Contains(err.Error(), "hunter2"), "%v", err)
	check.That(t, !strings.Contains(r.process.Log(), "hunter2"), "in the log")
	r.killed("driver-attached", v.stage)
	check.Code(t, v.stage(), codes.Aborted) // what was begun is not undone
	v.must(v.unstage, v.remove)
}

// TestProbesOfALoopDevice has another program, such as udev or losetup, look at the loop
// device while its volume is unstaged. The device goes when that has closed it.
func TestProbesOfALoopDevice(t *testing.T) {
	r := newDriver(t, false)
	v := r.volume("probed", rig.BlockAccess())
	v.up()
	probe := func() *os.File {
		return check.Value(os.Open(r.loops()[0]))(t)
	}
	short := probe()
	v.must(v.unpublish, v.unstage)
	time.AfterFunc(200*time.Millisecond, func() { _ = short.Close() })
	v.must(v.stage, v.publish)
	short = probe()
	v.must(v.unpublish, v.unstage)
	time.AfterFunc(200*time.Millisecond, func() { _ = short.Close() })
	made := v.mustSnapshot("s").GetSnapshotId()
	check.That(t, r.consistent(made), "a device that is leaving counts as in use")
	check.Must(t, r.removeSnapshot(made))
	v.must(v.stage, v.publish)
	long := probe()
	v.must(v.unpublish, v.unstage)
	check.Code(t, v.stage(), codes.Aborted)
	check.Code(t, v.remove(), codes.FailedPrecondition)
	time.AfterFunc(200*time.Millisecond, func() { _ = long.Close() })
	v.must(v.remove)
}
