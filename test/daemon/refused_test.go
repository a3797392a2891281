//go:build system

package daemon

import (
	"strings"
	"testing"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestStageRefuses is an error that names the volume, and nothing is mounted or claimed.
func TestStageRefuses(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	d.Start()
	disk, blank := rig.Disk(t, 16*mib, "ext4"), rig.Disk(t, 16*mib, "")
	for name, change := range map[string]func(*runtimev1.RuntimeStageVolumeRequest){
		"filesystem": func(r *runtimev1.RuntimeStageVolumeRequest) { r.FsType = "zfs" },
		"another":    func(r *runtimev1.RuntimeStageVolumeRequest) { r.FsType = "xfs" },
		"blank":      func(r *runtimev1.RuntimeStageVolumeRequest) { r.VolumeBackingPath = blank },
		"network":    func(r *runtimev1.RuntimeStageVolumeRequest) { r.VolumeType.Type = runtimev1.VolumeType_NETWORK },
		"bind":       func(r *runtimev1.RuntimeStageVolumeRequest) { r.MountFlags = []string{"bind"} },
		"group":      func(r *runtimev1.RuntimeStageVolumeRequest) { r.VolumeSupplementalGroup = "0" },
	} {
		req := d.StageRequest("pod-1", disk)
		change(req)
		_, err := d.Runtime().RuntimeStageVolume(t.Context(), req)
		check.That(t, err != nil && strings.Contains(err.Error(), req.GetVolumeTargetPath()), "%s: %v", name, err)
	}
	wantGone(t, d, disk)
}
