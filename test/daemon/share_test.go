//go:build system

package daemon

import (
	"os"
	"testing"

	"google.golang.org/grpc/codes"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestTwoDaemonsShareKatasTree: each with a run directory and a kubelet root of its own,
// as the error message advises where two want the same.
func TestTwoDaemonsShareKatasTree(t *testing.T) {
	t.Parallel()
	one, two := rig.NewDaemon(t), rig.NewDaemon(t)
	two.Kata = one.Kata
	one.Start()
	two.Start()
	disks := []string{rig.Disk(t, 16*mib, "ext4"), rig.Disk(t, 16*mib, "ext4")}
	first, second := one.StageRequest("pod-1", disks[0]), two.StageRequest("pod-2", disks[1])
	stage(t, one, first)
	stage(t, two, second)
	for _, d := range []*rig.Daemon{one, two, one, two} {
		d.Kill()
		d.Start()
		_, err := d.Admin().Reconcile(t.Context(), &adminv1.ReconcileRequest{})
		check.Must(t, err)
	}
	entries, err := os.ReadDir(one.Kata)
	check.Must(t, err)
	if len(entries) != 2 {
		t.Errorf("of two volumes there are %v", entries)
	}
	_, err = two.Runtime().RuntimeStageVolume(t.Context(), two.StageRequest("pod-3", disks[0]))
	check.Code(t, err, codes.FailedPrecondition)
	unstage(t, one, first)
	unstage(t, two, second)
	one.WantClean()
	two.WantClean()
}
