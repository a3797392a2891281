//go:build system

package daemon

import (
	"os/exec"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// A read-only volume whose journal needs replay would keep its pod from starting
// for ever, and nobody would say why. It is refused when it is staged, unless its
// mount options leave the journal alone.
func TestUncleanReadOnlyVolumeIsRefused(t *testing.T) {
	d := rig.NewDaemon(t)
	d.Start()
	disk := rig.Disk(t, 64*mib, "ext4")
	if out, err := exec.Command("debugfs", "-w", "-R", "feature needs_recovery", disk).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	_, err := d.Runtime().RuntimeStageVolume(t.Context(), d.StageRequest("pod-1", disk, "ro"))
	check.Code(t, err, codes.FailedPrecondition)
	if !strings.Contains(err.Error(), "not unmounted cleanly") || !strings.Contains(err.Error(), "has the volume read-write") {
		t.Errorf("the error does not say what is wrong and what helps: %v", err)
	}
	d.WantClean()
	for _, flags := range [][]string{{"ro", "noload"}, nil} {
		req := d.StageRequest("pod-1", disk, flags...)
		stage(t, d, req)
		unstage(t, d, req)
	}
	d.WantClean()
}
