//go:build system

package driver_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// wantHealth wants one fault of a volume, or none where the reason is empty.
func (v *volume) wantHealth(kind csi.VolumeHealthErrorType, reason string) {
	v.t.Helper()
	// The kernel counts errors a moment after they happen.
	check.Eventually(v.t, fmt.Sprintf("health of %s is %s %q", v.name, kind, reason), func() bool {
		reply := check.Value(v.NodeGetVolumeHealth(v.t.Context(), &csi.NodeGetVolumeHealthRequest{
			VolumeId: v.id, VolumePublishPath: v.target, StagingTargetPath: v.staging,
		}))(v.t)
		got := reply.GetVolumeHealth().GetHealthStatuses()
		if reason == "" {
			return reply.GetVolumeHealth().GetVolumeId() == v.id && len(got) == 0
		}
		return len(got) == 1 && got[0].GetStatus() == kind && got[0].GetReason() == reason && got[0].GetMessage() != ""
	})
}

// shutdown stops an ext4 or xfs, as a device that fails for good does.
func shutdown(t *testing.T, dir string) {
	t.Helper()
	const request, withoutFlush = 0x8004587d, 2
	file := check.Value(os.Open(dir))(t)
	defer func() { _ = file.Close() }()
	check.Must(t, unix.IoctlSetPointerInt(int(file.Fd()), request, withoutFlush))
}

// TestVolumeHealth is what the node's kernel knows of the filesystem and the device, and
// what the pool knows of the image.
func TestVolumeHealth(t *testing.T) {
	const degraded, inaccessible = csi.VolumeHealthErrorType_DEGRADED, csi.VolumeHealthErrorType_INACCESSIBLE
	r := newDriver(t, false)
	errs := r.volume("errors", rig.MountAccess("ext4"))
	errs.up()
	errs.wantHealth(0, "")
	trigger := "/sys/fs/ext4/" + filepath.Base(r.loops()[0]) + "/trigger_fs_error"
	check.Must(t, os.WriteFile(trigger, []byte("a test"), 0o200))
	errs.wantHealth(degraded, abi.ReasonErrors)
	errs.down()

	stopped := r.volume("stopped", rig.MountAccess("xfs"))
	stopped.up()
	stopped.wantHealth(0, "")
	shutdown(t, stopped.target)
	stopped.wantHealth(inaccessible, abi.ReasonShutDown)
	stopped.down()

	block := r.volume("block", rig.BlockAccess())
	block.up()
	block.wantHealth(0, "")
	check.Must(t, os.Truncate(block.image(), size/2))
	block.wantHealth(degraded, "ImageTooSmall")
	check.Must(t, os.Truncate(block.image(), size))
	block.must(block.unpublish)
	check.Must(t, loopdev.Detach(r.loops()[0]))
	check.Eventually(t, "the loop device has gone", func() bool { return len(r.loops()) == 0 })
	block.wantHealth(inaccessible, "DeviceDetached")
	block.must(block.unstage)
	block.wantHealth(0, "") // it is nowhere, and nothing is wrong with it
	check.Must(t, os.Remove(block.image()))
	block.wantHealth(inaccessible, "ImageMissing")
	block.must(block.remove)
	for id, code := range map[string]codes.Code{"": codes.InvalidArgument, block.id: codes.NotFound} {
		check.Code(t, check.Err(r.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})), code)
	}
}
