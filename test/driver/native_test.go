//go:build system

package driver_test

import (
	"errors"
	"os"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/internal/disk/superblock"
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
	check.Require(v.t, err == nil && given, "given %v: %v", given, err)
	return mount, nil
}

func TestDeferredReaders(t *testing.T) {
	r := newDriver(t, true)
	v := r.volume("v", rig.MountAccess("ext4"))
	v.must(v.create, v.stage)
	check.Must(t, check.Err(v.publishDeferred(false)))
	second := *v
	second.target += "-2"
	check.That(t, check.Err(second.publishDeferred(true)) != nil, "a reader beside a writer")
	// A filesystem is mounted on the node or in a sandbox, also where both only read.
	check.Code(t, second.publish(), codes.FailedPrecondition)
	plain := v.request()
	plain.Readonly = true
	v.must(v.unpublish, func() error { _, err := v.NodePublishVolume(t.Context(), plain); return err })
	check.Code(t, check.Err(second.publishDeferred(true)), codes.FailedPrecondition)
	v.must(v.unpublish)
	// A volume of one pod has no other pod beside it, whichever comes first.
	sole := second
	sole.access = rig.MountAccess("ext4")
	sole.access.AccessMode.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	for first, then := range map[*volume]*volume{v: &sole, &sole: v} {
		first.must(first.publish)
		check.Code(t, then.publish(), codes.FailedPrecondition)
		first.must(first.unpublish)
	}
	for _, one := range []*volume{v, &second} {
		mount := check.Value(one.publishDeferred(true))(t)
		check.That(t, slices.Contains(mount.GetMountFlags(), "ro"), "%v", mount)
	}
	second.must(second.unpublish)
	v.down()
	block := r.volume("b", rig.BlockAccess())
	block.must(block.create, block.stage)
	check.Code(t, check.Err(block.publishDeferred(false)), codes.InvalidArgument)
	block.must(block.unstage, block.remove)
}

// TestDeferredAfterABlock: what a pod has written to the device itself is examined again.
func TestDeferredAfterABlock(t *testing.T) {
	r := newDriver(t, true)
	v := r.volume("v", rig.MountAccess("ext4"))
	deferred := func() error { return check.Err(v.publishDeferred(false)) }
	v.must(v.create, v.stage, deferred, v.unpublish, v.unstage)
	block := *v
	block.access = rig.BlockAccess()
	block.must(block.stage, block.publish)
	device := check.Value(os.OpenFile(block.target, os.O_RDWR, 0))(t)
	check.Must(t, errors.Join(unix.Fallocate(int(device.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, size), device.Close()))
	block.must(block.unpublish, block.unstage)
	v.must(v.stage, deferred, v.unpublish, v.unstage)
	image := check.Value(os.Open(r.imageOf(v.id)))(t)
	check.Must(t, check.Err(superblock.Read(image, "ext4")))
	check.Must(t, image.Close())
	v.must(v.remove)
}

// TestReadersOfAFrozenXFS: a frozen xfs always has something in its log, which is not replayed
// where a volume is read-only. It is whole without that, until somebody has written to it.
func TestReadersOfAFrozenXFS(t *testing.T) {
	r := newDriverOn(t, "xfs", true, aMinute...)
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
		whole := slices.Contains(check.Value(v.publishDeferred(false))(t).GetMountFlags(), "norecovery")
		taken := v.mustSnapshot("taken").GetSnapshotId()
		check.That(t, r.consistent(taken), "nobody writes, and a snapshot that is taken meanwhile is not consistent")
		check.Must(t, r.removeSnapshot(taken))
		v.must(v.unpublish, v.unstage)
		return whole
	}
	for _, v := range []*volume{restored, copied} {
		check.That(t, snapshots.NeedsReplay(t, v.image(), "xfs"), "a frozen xfs has an empty log")
		for range 2 {
			check.That(t, asIs(v), "the log would have to be replayed")
		}
		v.access.AccessMode.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
		v.must(v.stage, v.publish)
		v.wantKept("kept")
		v.must(v.unpublish, v.unstage)
		check.That(t, !asIs(v), "what was written since may be missing")
		v.must(v.remove)
	}
	check.Must(t, r.removeSnapshot(made.GetSnapshotId()))
}

func TestPlainRefusesDeferral(t *testing.T) {
	r := newDriver(t, false)
	v := r.volume("v", rig.MountAccess("ext4"))
	v.must(v.create, v.stage)
	check.Code(t, check.Err(v.publishDeferred(false)), codes.InvalidArgument)
	v.must(v.unstage, v.remove)
}
