//go:build system

package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// newCrust lays out a daemon with the handlers of the directory ABI and of Kata.
func newCrust(t *testing.T) *rig.Daemon {
	t.Helper()
	d := rig.NewDaemon(t)
	d.Handlers = fmt.Sprintf("default: crust\ncrust: {enabled: true, root: %s/crust}", d.Dir)
	return d
}

func wantGoneOfCrust(t *testing.T, d *rig.Daemon, disk string) {
	t.Helper()
	left, err := filepath.Glob(d.Dir + "/crust/*")
	check.Must(t, err)
	if len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	wantGone(t, d, disk)
}

func TestKilledAtEveryStepOfTheDirectoryABI(t *testing.T) {
	for _, step := range []string{"stage-claimed", "crust-directory-made", "crust-built", "stage-published"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			d := newCrust(t)
			disk := rig.Disk(t, 16*mib, "ext4")
			req := d.StageRequest("pod-1", disk)
			d.Start("CRUST_FAILPOINTS=" + step + "=kill")
			_, err := d.Runtime().RuntimeStageVolume(t.Context(), req)
			diedAt(t, d, err)
			d.Start()
			stage(t, d, req)
			unstage(t, d, req)
			wantGoneOfCrust(t, d, disk)
		})
	}
	for _, step := range []string{"unstage-begun", "crust-taken-away", "unstage-released"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			d := newCrust(t)
			disk := rig.Disk(t, 16*mib, "ext4")
			req := d.StageRequest("pod-1", disk)
			d.Start("CRUST_FAILPOINTS=" + step + "=kill")
			stage(t, d, req)
			_, err := d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))
			diedAt(t, d, err)
			d.Start()
			wantGoneOfCrust(t, d, disk)
		})
	}
}

func TestImageFileIsRefusedByTheDirectoryABI(t *testing.T) {
	t.Parallel()
	d := newCrust(t)
	d.Start()
	image := d.Images + "/disk"
	check.Must(t, os.WriteFile(image, make([]byte, mib), 0o600))
	_, err := d.Runtime().RuntimeStageVolume(t.Context(), d.StageRequest("pod-1", image))
	check.Code(t, err, codes.Unimplemented)
	if !strings.Contains(err.Error(), "loop device") {
		t.Errorf("the error gives no advice: %v", err)
	}
	d.WantClean()
}
