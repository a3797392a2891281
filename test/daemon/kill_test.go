//go:build system

package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

func TestMain(m *testing.M) {
	if what := os.Getenv(withoutCallEnv); what != "" {
		_, _ = fmt.Fprintln(os.Stderr, execWithoutCall(what)) // it returns only an error
		os.Exit(1)
	}
	if os.Getenv(strangerEnv) != "" {
		os.Exit(m.Run())
	}
	os.Exit(rig.Main(m))
}

const mib = 1 << 20

var stageSteps = []string{
	"stage-claimed", "stage-recorded", "stage-readonly", "stage-made-target", "stage-guarded",
	"kata-directory-made", "kata-built", "crust-directory-made", "crust-built", "stage-published",
}

var unstageSteps = []string{
	"unstage-begun", "kata-taken-away", "crust-taken-away", "unstage-retracted", "unstage-unguarded", "unstage-put-back", "unstage-released",
}

// ofBoth are the steps that are taken with the handler crust, too, which has only a plain descriptor of the device.
var ofBoth = []string{"stage-claimed", "stage-published", "unstage-begun", "unstage-released"}

// withHandlers names each step after the handler that takes it.
func withHandlers(steps []string) []string {
	all := slices.Clone(steps)
	for _, step := range ofBoth {
		if slices.Contains(steps, step) {
			all = append(all, "crust: "+step)
		}
	}
	return all
}

// killAt is what the environment says for a step that withHandlers gave.
func killAt(step string) string {
	return "CRUST_FAILPOINTS=" + strings.TrimPrefix(step, "crust: ") + "=kill"
}

// daemonFor lays out a daemon whose volumes go to the handler that takes a step.
func daemonFor(t *testing.T, step string) *rig.Daemon {
	t.Helper()
	d := rig.NewDaemon(t)
	if strings.HasPrefix(step, "crust") {
		d.Handlers = fmt.Sprintf("default: crust\ncrust: {enabled: true, root: %s/crust}", d.Dir)
	}
	return d
}

// diedAt checks that the daemon was killed at the failpoint, not before, and that a driver which reads
// Kata's volumes of all programs can go on.
func diedAt(t *testing.T, d *rig.Daemon, err error) {
	t.Helper()
	check.Code(t, err, codes.Unavailable)
	d.WaitEnd(20 * time.Second)
	check.Must(t, check.Err(kata.Scan(d.Kata)))
}

func TestKilledAtEveryStepOfStage(t *testing.T) {
	for _, step := range withHandlers(stageSteps) {
		for _, next := range []string{"stage", "unstage"} {
			t.Run(step+", then "+next, func(t *testing.T) {
				t.Parallel()
				d := daemonFor(t, step)
				disk := rig.Disk(t, 16*mib, "ext4")
				req := d.StageRequest("pod-1", disk, "ro")
				d.Start(killAt(step))
				diedAt(t, d, check.Err(d.Runtime().RuntimeStageVolume(t.Context(), req)))
				d.Start()
				if next == "stage" {
					stage(t, d, req)
					wantStaged(t, d, req, disk)
				}
				unstage(t, d, req)
				wantGone(t, d, disk)
			})
		}
	}
}

func TestKilledAtEveryStepOfUnstage(t *testing.T) {
	for _, step := range withHandlers(unstageSteps) {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			d := daemonFor(t, step)
			disk := rig.Disk(t, 16*mib, "ext4")
			req := d.StageRequest("pod-1", disk, "ro")
			d.Start(killAt(step))
			stage(t, d, req)
			diedAt(t, d, check.Err(d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))))
			// The start ends what was begun, whether the call comes again or not.
			d.Start()
			wantGone(t, d, disk)
			unstage(t, d, req)
			stage(t, d, req)
			wantStaged(t, d, req, disk)
			unstage(t, d, req)
			wantGone(t, d, disk)
		})
	}
}

func unstageRequest(req *runtimev1.RuntimeStageVolumeRequest) *runtimev1.RuntimeUnstageVolumeRequest {
	return &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: req.GetVolumeTargetPath()}
}

func unstage(t *testing.T, d *rig.Daemon, req *runtimev1.RuntimeStageVolumeRequest) {
	t.Helper()
	check.Must(t, check.Err(d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))))
}

// wantStaged checks everything that a staged read-only volume consists of.
func wantStaged(t *testing.T, d *rig.Daemon, req *runtimev1.RuntimeStageVolumeRequest, disk string) {
	t.Helper()
	mounts := rig.MountPoints(req.GetVolumeTargetPath())
	check.That(t, len(mounts) == 1, "%d guards stand", len(mounts))
	left := append(d.Leftovers(), ofCrust(t, d)...) // record, projection, guard
	check.That(t, len(left) == 3, "a staged volume consists of %q", left)
	check.That(t, rig.TryWrite(disk) != nil, "the device is writable")
	wantClaimed(t, disk, d.Handlers == "") // a sandbox of crust-runc's is to mount it on this kernel
}

// ofCrust lists what stands in the directory of the handler crust.
func ofCrust(t *testing.T, d *rig.Daemon) []string {
	t.Helper()
	return check.Value(filepath.Glob(d.Dir + "/crust/*"))(t)
}

func wantClaimed(t *testing.T, disk string, want bool) {
	t.Helper()
	err := rig.Exclusive(disk)
	check.That(t, (err != nil) == want, "claiming the device: %v; want it claimed: %v", err, want)
}

func wantGone(t *testing.T, d *rig.Daemon, disk string) {
	t.Helper()
	d.WantClean()
	check.Empty(t, ofCrust(t, d), "left")
	wantClaimed(t, disk, false)
	check.NoError(t, rig.TryWrite(disk), "the device was not put back")
}
