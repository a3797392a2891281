//go:build system

package daemon

import (
	"os"
	"testing"

	"google.golang.org/grpc/codes"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// A volume that is expanded before its pod has a sandbox is grown when one mounts
// it; kubelet would start no pod after an error.
func TestExpandBeforeThereIsASandbox(t *testing.T) {
	d := rig.NewDaemon(t)
	d.Handlers = "default: crust\ncrust: {enabled: true, root: " + d.Dir + "/crust}"
	d.Start()
	image := rig.Image(t, 16*mib)
	rig.Mkfs(t, "ext4", image)
	disk := rig.Loop(t, image, loopdev.Options{})
	req := d.StageRequest("pod-1", disk)
	_, err := d.Runtime().RuntimeStageVolume(t.Context(), req)
	check.Must(t, err)
	check.Must(t, os.Truncate(image, 32*mib))
	check.Must(t, loopdev.Grow(disk))
	expand := func(least, most int64) (int64, error) {
		reply, err := d.Runtime().RuntimeExpandVolume(t.Context(), &runtimev1.RuntimeExpandVolumeRequest{
			VolumeTargetPath: req.GetVolumeTargetPath(),
			CapacityRange:    &runtimev1.CapacityRange{RequiredBytes: least, LimitBytes: most},
		})
		return reply.GetCapacityBytes(), err
	}
	for _, bad := range [][2]int64{{33 * mib, 0}, {1, 31 * mib}} {
		_, err := expand(bad[0], bad[1])
		check.Code(t, err, codes.OutOfRange)
	}
	size, err := expand(32*mib, 64*mib)
	if err != nil || size != 32*mib {
		t.Fatalf("%d, %v", size, err)
	}
	for range 2 { // and after a restart
		shown, err := d.Admin().GetVolume(t.Context(), &adminv1.GetVolumeRequest{Volume: req.GetVolumeTargetPath()})
		if err != nil || shown.GetVolume().GetGrowToBytes() != 32*mib {
			t.Fatalf("on record: %v, %v", shown, err)
		}
		d.Kill()
		d.Start()
	}
	unstage(t, d, req)
	d.WantClean()
}
