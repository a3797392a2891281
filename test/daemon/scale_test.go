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
	manyVolumes = 800
	// slowRead is far above what a busy machine takes for any of the reads below;
	// reading the mount table once for each volume took ten seconds for one caller.
	slowRead = 10 * time.Second
)

// TestReadsOfManyVolumesAreQuick: what operators and Prometheus ask of a node with
// thousands of volumes is linear in their number, also when many ask at a time.
func TestReadsOfManyVolumesAreQuick(t *testing.T) {
	d := rig.NewDaemon(t)
	d.Start()
	var requests []*runtimev1.RuntimeStageVolumeRequest
	for n := range manyVolumes {
		image := filepath.Join(d.Images, fmt.Sprint(n))
		check.Must(t, os.WriteFile(image, nil, 0o600))
		check.Must(t, os.Truncate(image, 16*mib))
		requests = append(requests, d.StageRequest(fmt.Sprintf("pod-%d", n), image))
	}
	// One device that could be mounted on the host: the mount table has to be read.
	requests = append(requests, d.StageRequest("pod-disk", rig.Disk(t, 16*mib, "")))
	client, admin := d.Runtime(), d.Admin()
	for _, req := range requests {
		_, err := client.RuntimeStageVolume(t.Context(), req)
		check.Must(t, err)
	}
	for name, read := range map[string]func() error{
		"GetNode":      func() error { _, err := admin.GetNode(t.Context(), &adminv1.GetNodeRequest{}); return err },
		"ListVolumes":  func() error { _, err := admin.ListVolumes(t.Context(), &adminv1.ListVolumesRequest{}); return err },
		"ListHandlers": func() error { _, err := admin.ListHandlers(t.Context(), &adminv1.ListHandlersRequest{}); return err },
		"Reconcile":    func() error { _, err := admin.Reconcile(t.Context(), &adminv1.ReconcileRequest{}); return err },
		"the scrape":   func() error { _, err := d.HTTP("/metrics"); return err },
	} {
		start := time.Now()
		var group errgroup.Group
		callers := 8
		if name == "the scrape" {
			callers = 4 // as many as are served at a time
		}
		for range callers {
			group.Go(read)
		}
		check.Must(t, group.Wait())
		if took := time.Since(start); took > slowRead {
			t.Errorf("%s took %s for %d callers with %d volumes", name, took, callers, manyVolumes)
		} else {
			t.Logf("%s took %s for %d callers", name, took, callers)
		}
	}
	for _, req := range requests {
		unstage(t, d, req)
	}
	d.WantClean()
}
