//go:build system

package daemon

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestShimKilledAndItsVMMNot has a sandbox whose shim is killed, and with it all
// that a handler or a container runtime knows, while its VMM goes on.
func TestShimKilledAndItsVMMNot(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	d.Start()
	disk := rig.Disk(t, 16*mib, "ext4")
	req := d.StageRequest("pod-1", disk)
	target := req.GetVolumeTargetPath()
	stage(t, d, req)
	shim := boot(t, d, "sandbox-1", target, disk, "/")
	vmm := rig.Hold(t, "<>", disk)
	check.Must(t, shim.Kill())

	refused := func(when string) {
		t.Helper()
		_, err := d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))
		check.Code(t, err, codes.Aborted)
		if !strings.Contains(err.Error(), fmt.Sprintf(`process %d ("cat")`, vmm.Process.Pid)) {
			t.Errorf("%s: the error does not name the process: %v", when, err)
		}
	}
	refused("after the shim's death")
	d.Kill()
	d.Start()
	refused("after the daemon's death")

	crustctl := func(args ...string) string {
		t.Helper()
		out, err := exec.Command(rig.Program(t, "crustctl"), append([]string{"--socket", d.AdminSocket}, args...)...).CombinedOutput()
		if err != nil {
			t.Errorf("crustctl %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	for _, args := range [][]string{{"list"}, {"get", target}} {
		if out := crustctl(args...); !strings.Contains(out, fmt.Sprint("process ", vmm.Process.Pid)) {
			t.Errorf("crustctl %v does not show who has the device:\n%s", args, out)
		}
	}
	wantFinding(t, d, fmt.Sprint("process ", vmm.Process.Pid))
	if n := metric(t, d, "crust_proxy_devices_held"); n != 1 {
		t.Errorf("crust_proxy_devices_held is %v", n)
	}

	if out := crustctl("release", target, "--force"); !strings.Contains(out, fmt.Sprint(vmm.Process.Pid)) {
		t.Errorf("a forced release does not say who has the device:\n%s", out)
	}
	if metric(t, d, "crust_proxy_forced_releases_total") != 1 {
		t.Error("a forced release was not counted")
	}
	for range 2 {
		if out := crustctl("list", "--state", "held"); !strings.Contains(out, target) {
			t.Errorf("a device that was released by force and is in use is not listed:\n%s", out)
		}
		wantFinding(t, d, fmt.Sprint("process ", vmm.Process.Pid))
		if n := metric(t, d, "crust_proxy_devices_held"); n != 1 {
			t.Errorf("crust_proxy_devices_held is %v", n)
		}
		d.Kill()
		d.Start()
	}
	if !strings.Contains(d.Log(), "released by force") {
		t.Error("a forced release was not logged")
	}
	_, err := d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req)) // kubelet repeats its call
	check.Must(t, err)
	_, err = d.Runtime().RuntimeStageVolume(t.Context(), d.StageRequest("pod-2", disk))
	check.Code(t, err, codes.Aborted)
	vmm.End()
	_, err = d.Admin().Reconcile(t.Context(), &adminv1.ReconcileRequest{})
	check.Must(t, err)
	if n := metric(t, d, "crust_proxy_devices_held"); n != 0 {
		t.Errorf("crust_proxy_devices_held is %v after the VMM's end", n)
	}
	next := d.StageRequest("pod-2", disk)
	stage(t, d, next)
	unstage(t, d, next)
	wantGone(t, d, disk)
}

func wantFinding(t *testing.T, d *rig.Daemon, text string) {
	t.Helper()
	node, err := d.Admin().GetNode(t.Context(), &adminv1.GetNodeRequest{})
	check.Must(t, err)
	if !strings.Contains(strings.Join(node.GetFindings(), "\n"), text) {
		t.Errorf("no finding says %q: %v", text, node.GetFindings())
	}
}
