//go:build system

package driver_test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/snapshots"
)

// defer publishes with defer_fs_ops set.
func (v *volume) publishDeferred(readOnly bool) (*csiv1.DeferredMount, error) {
	v.t.Helper()
	request := v.request()
	request.Readonly = readOnly
	csidefer.SetRequested(request)
	reply, err := v.NodePublishVolume(v.t.Context(), request)
	if err != nil {
		return nil, err
	}
	mount, given, err := csidefer.DeferredMount(reply)
	if err != nil || !given {
		v.t.Fatalf("given %v: %v", given, err)
	}
	return mount, nil
}

func TestNativeReports(t *testing.T) {
	r := newDriver(t, true)
	reply, err := r.NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
	check.Must(t, err)
	if !slices.ContainsFunc(reply.GetCapabilities(), func(one *csi.NodeServiceCapability) bool {
		return int32(one.GetRpc().GetType()) == int32(csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS)
	}) {
		t.Errorf("no DEFER_FS_OPS: %v", reply)
	}
	info, err := r.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	check.Must(t, err)
	if names, err := csidefer.FileSystems(info); err != nil || strings.Join(names, " ") != "ext4 xfs btrfs" {
		t.Errorf("%q, %v", names, err)
	}
}

// TestDeferred lets the test be the sandbox: it mounts what the driver answers.
func TestDeferred(t *testing.T) {
	r := newDriver(t, true)
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		v := r.volume(fs, rig.MountAccess(fs))
		v.access.GetMount().MountFlags = []string{"noatime"}
		v.must(v.create, v.stage)
		var mount *csiv1.DeferredMount
		for range 2 {
			var err error
			if mount, err = v.publishDeferred(false); err != nil {
				t.Fatal(err)
			}
			r.restart()
		}
		if mount.GetFsType() != fs || strings.Join(mount.GetMountFlags(), ",") != "noatime" {
			t.Errorf("%v", mount)
		}
		if left := rig.MountPoints(r.dir); len(left) > 0 {
			t.Errorf("%s: mounted on the node: %v", fs, left)
		}
		if _, err := os.Lstat(v.target); err == nil {
			t.Errorf("%s: something was made at the target", fs)
		}
		sandbox := r.dir + "/sandbox"
		check.Must(t, os.MkdirAll(sandbox, 0o700))
		check.Must(t, unix.Mount(mount.GetVolumeBackingPath(), sandbox, fs, 0, ""))
		check.Must(t, os.WriteFile(sandbox+"/kept", []byte("by the guest"), 0o600))
		v.grow(2 * size)
		check.Must(t, v.growNode(v.target, 2*size))
		if out, err := exec.Command("blockdev", "--getsize64", mount.GetVolumeBackingPath()).Output(); err != nil || strings.TrimSpace(string(out)) != "671088640" {
			t.Errorf("%s: the device has %q bytes: %v", fs, out, err)
		}
		check.Must(t, unix.Unmount(sandbox, 0))
		// The same volume for a pod without a sandbox of its own, when it is free.
		check.Code(t, (&volume{testDriver: r, id: v.id, staging: v.staging, target: v.target + "-2", access: v.access}).publish(), codes.FailedPrecondition)
		v.must(v.unpublish, v.publish)
		v.wantKept("by the guest")
		other := *v
		other.target += "-2"
		if _, err := other.publishDeferred(false); err == nil {
			t.Error("deferred while it is mounted on the node")
		}
		v.must(v.unpublish)
		if left := rig.MountPoints(r.dir); len(left) > 0 {
			t.Errorf("%s: staging is not free: %v", fs, left)
		}
		if _, err := other.publishDeferred(false); err != nil {
			t.Error(err)
		}
		other.must(other.unpublish)
		v.must(v.unstage, v.remove)
	}
	r.wantNothing()
}

func TestDeferredReaders(t *testing.T) {
	r := newDriver(t, true)
	v := r.volume("v", rig.MountAccess("ext4"))
	v.must(v.create, v.stage)
	if _, err := v.publishDeferred(false); err != nil {
		t.Fatal(err)
	}
	second := *v
	second.target += "-2"
	if _, err := second.publishDeferred(true); err == nil {
		t.Error("a reader beside a writer")
	}
	v.must(v.unpublish)
	for _, one := range []*volume{v, &second} {
		mount, err := one.publishDeferred(true)
		check.Must(t, err)
		if !slices.Contains(mount.GetMountFlags(), "ro") {
			t.Errorf("%v", mount)
		}
	}
	second.must(second.unpublish)
	v.down()
	block := r.volume("b", rig.BlockAccess())
	block.must(block.create, block.stage)
	_, err := block.publishDeferred(false)
	check.Code(t, err, codes.InvalidArgument)
	block.must(block.unstage, block.remove)
	r.wantNothing()
}

// TestReadersOfAFrozenXFS: a frozen xfs always has something in its log, which is not replayed
// where a volume is read-only. It is whole without that, until somebody has written to it.
func TestReadersOfAFrozenXFS(t *testing.T) {
	r := newDriverOn(t, "xfs", true)
	v := r.volume("v", rig.MountAccess("xfs"))
	v.up()
	v.put("kept")
	made := v.mustSnapshot("s")
	v.down()
	restored, copied := r.volume("restored", rig.MountAccess("xfs")), r.volume("copied", rig.MountAccess("xfs"))
	check.Must(t, restored.createFrom(snapshotSource(made.GetSnapshotId()), 0))
	check.Must(t, copied.createFrom(restored.asSource(), 0))
	asIs := func(v *volume) bool {
		t.Helper()
		v.access.AccessMode.Mode = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
		v.must(v.stage)
		mount, err := v.publishDeferred(false)
		check.Must(t, err)
		whole := slices.Contains(mount.GetMountFlags(), "norecovery")
		taken := v.mustSnapshot("taken").GetSnapshotId()
		if r.consistent(taken) != whole {
			t.Errorf("a snapshot that is taken meanwhile is consistent: %v", !whole)
		}
		check.Must(t, r.removeSnapshot(taken))
		v.must(v.unpublish, v.unstage)
		return whole
	}
	for _, v := range []*volume{restored, copied} {
		if !snapshots.NeedsReplay(t, v.image(), "xfs") {
			t.Error("a frozen xfs has an empty log")
		}
		for range 2 {
			if !asIs(v) {
				t.Error("the log would have to be replayed")
			}
		}
		v.access.AccessMode.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
		v.must(v.stage, v.publish)
		v.wantKept("kept")
		v.must(v.unpublish, v.unstage)
		if asIs(v) {
			t.Error("what was written since may be missing")
		}
		v.must(v.remove)
	}
	check.Must(t, r.removeSnapshot(made.GetSnapshotId()))
	r.wantNothing()
}

func TestPlainRefusesDeferral(t *testing.T) {
	r := newDriver(t, false)
	v := r.volume("v", rig.MountAccess("ext4"))
	v.must(v.create, v.stage)
	_, err := v.publishDeferred(false)
	check.Code(t, err, codes.InvalidArgument)
	v.must(v.unstage, v.remove)
	r.wantNothing()
}
