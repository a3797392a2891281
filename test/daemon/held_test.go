//go:build system

package daemon

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestOperatorSeesWhoHasADevice of a volume that is to go, and after a forced release.
func TestOperatorSeesWhoHasADevice(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	d.Start()
	disk := rig.Disk(t, 16*mib, "ext4")
	req := d.StageRequest("pod-1", disk)
	stage(t, d, req)
	vmm := rig.Hold(t, "<>", disk)
	who := fmt.Sprintf("process %d", vmm.Process.Pid)
	_, err := d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))
	check.Code(t, err, codes.Aborted, who)
	for _, forced := range []float64{0, 1} {
		if forced > 0 {
			out, err := d.Crustctl("release", req.GetVolumeTargetPath(), "--force", "--yes").CombinedOutput()
			check.That(t, err == nil && strings.Contains(string(out), fmt.Sprint(vmm.Process.Pid)), "a forced release: %v\n%s", err, out)
		}
		node, err := d.Admin().GetNode(t.Context(), &adminv1.GetNodeRequest{})
		check.Must(t, err)
		if out, err := d.Crustctl("list").CombinedOutput(); err != nil || !strings.Contains(string(out)+strings.Join(node.GetFindings(), "\n"), who) {
			t.Errorf("%v\n%s\n%v", err, out, node.GetFindings())
		}
		if held, counted := metric(t, d, "crust_proxy_devices_held"), metric(t, d, "crust_proxy_forced_releases_total"); held != 1 || counted != forced {
			t.Errorf("%v devices are held, and %v were released by force", held, counted)
		}
	}
	for range 2 { // and after a restart
		if out, err := d.Crustctl("doctor", "--quiet").CombinedOutput(); err == nil || !strings.Contains(string(out), "was released by force") {
			t.Errorf("doctor: %v\n%s", err, out)
		}
		d.Kill()
		d.Start()
	}
	vmm.End()
	_, err = d.Admin().Reconcile(t.Context(), &adminv1.ReconcileRequest{})
	check.Must(t, err)
	held := metric(t, d, "crust_proxy_devices_held")
	check.That(t, held == 0, "%v devices are held", held)
	wantGone(t, d, disk)
}
