//go:build system

package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

const (
	// fewVolumes is a quarter of manyVolumes.
	fewVolumes, manyVolumes = 200, 800
	// readCallers is how many read at a time.
	readCallers = 4
	// mostTimes lies between what a linear read takes for four times the volumes, and the
	// sixteen times of one that reads the mount table once for each volume.
	mostTimes = 9
)

// TestReadsOfManyVolumesAreQuick: what operators and Prometheus ask of a node with
// thousands of volumes is linear in their number, also when many ask at a time. The
// daemon's processor time is compared, which is the same on a busy machine.
func TestReadsOfManyVolumesAreQuick(t *testing.T) {
	d := rig.NewDaemon(t)
	d.Start()
	// One device that could be mounted on the host: the mount table has to be read.
	requests := []*runtimev1.RuntimeStageVolumeRequest{d.StageRequest("pod-disk", rig.Disk(t, 16*mib, "ext4"))}
	for n := range manyVolumes {
		image := filepath.Join(d.Images, fmt.Sprint(n))
		check.Must(t, os.WriteFile(image, nil, 0o600))
		check.Must(t, os.Truncate(image, 16*mib))
		requests = append(requests, d.StageRequest(fmt.Sprintf("pod-%d", n), image))
	}
	client, admin := d.Runtime(), d.Admin()
	reads := map[string]func() error{
		"GetNode":      func() error { _, err := admin.GetNode(t.Context(), &adminv1.GetNodeRequest{}); return err },
		"ListVolumes":  func() error { _, err := admin.ListVolumes(t.Context(), &adminv1.ListVolumesRequest{}); return err },
		"ListHandlers": func() error { _, err := admin.ListHandlers(t.Context(), &adminv1.ListHandlersRequest{}); return err },
		"Reconcile":    func() error { _, err := admin.Reconcile(t.Context(), &adminv1.ReconcileRequest{}); return err },
		"the scrape":   func() error { _, err := d.HTTP("/metrics"); return err },
	}
	few := make(map[string]time.Duration)
	for n, req := range requests {
		check.Must(t, check.Err(client.RuntimeStageVolume(t.Context(), req)))
		if n == fewVolumes {
			for name, read := range reads {
				few[name] = cost(t, d, read)
			}
		}
	}
	for name, read := range reads {
		many := cost(t, d, read)
		times := float64(many) / float64(max(few[name], 500*time.Microsecond)) // the kernel may book less of a small one
		t.Logf("%s: %v with %d volumes, %v with %d: %.1f times", name, few[name], fewVolumes, many, manyVolumes, times)
		check.That(t, times <= mostTimes, "%s is not linear: it takes %.1f times as long for 4 times the volumes", name, times)
	}
	for _, req := range requests {
		unstage(t, d, req)
	}
	d.WantClean()
}

// cost is the daemon's processor time for a read by some callers at a time, the least of
// several rounds: collections of garbage fall into some of them.
func cost(t *testing.T, d *rig.Daemon, read func() error) time.Duration {
	t.Helper()
	least := time.Hour
	for range 5 {
		before := rig.CPUTime(t, d.Pid())
		var group errgroup.Group
		for range readCallers {
			group.Go(read)
		}
		check.Must(t, group.Wait())
		least = min(least, rig.CPUTime(t, d.Pid())-before)
	}
	return least
}
