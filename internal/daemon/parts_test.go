package daemon

import (
	"context"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/daemon/admin"
	"github.com/crust-proxy/crust-proxy/internal/daemon/history"
	"github.com/crust-proxy/crust-proxy/internal/daemon/sandboxes"
	"github.com/crust-proxy/crust-proxy/internal/disk/ondisk"
	"github.com/crust-proxy/crust-proxy/internal/front/registry"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// idleHandler has no volume in a sandbox, and none of other programs.
type idleHandler struct{ runtime.Handler }

func (idleHandler) Name() string                                              { return "kata" }
func (idleHandler) Adopted() []*volume.Volume                                 { return nil }
func (idleHandler) Health(context.Context) error                              { return nil }
func (idleHandler) Binding(*volume.Volume) (binding runtime.Binding, is bool) { return }
func (idleHandler) Orphans(func(volume.Key) bool) ([]*volume.Volume, error)   { return nil, nil }

// TestSeverities: what keeps pods from their volumes or is wrong with data is an error, what a pod has to do with is a warning.
func TestSeverities(t *testing.T) {
	state := telemetry.NodeState{
		Abnormal: []telemetry.VolumeCount{{Count: 5}}, GroupIgnored: []telemetry.VolumeCount{{Count: 6}},
		Handlers: map[string]bool{"kata": true, "crust": false}, Drivers: map[string]bool{"ebs": true, "lvm": false, "": false},
		Missing: map[string]bool{"ebs": true, "lvm": false},
	}
	for _, name := range []string{"bound", "degraded", "refused"} {
		addVolume(deferral.Status{}, name, &state)
	}
	for _, name := range []string{"bound", "held", "degraded"} {
		addVolume(deferral.Status{Held: &claim.Held{}}, name, &state)
		addVolume(deferral.Status{Held: &claim.Held{Forced: true}}, name, &state)
	}
	addSeverities(&state)
	check.That(t, state.Errors == 1+1+3+5+1+1+1 && state.Warnings == 1+2+6+1, "%d errors, %d warnings", state.Errors, state.Warnings)
}

// TestDriverThatLeftItsVolumes is one that is not ready, and no driver that is missed without a volume behind the front.
func TestDriverThatLeftItsVolumes(t *testing.T) {
	f := &driverFront{drivers: registry.New(registry.Config{}), volumes: func() iter.Seq[deferral.Status] {
		return slices.Values([]deferral.Status{
			{Volume: &volume.Volume{Driver: "ebs", Target: "/pods/a", Origin: &volume.Origin{PodNamespace: "shop", PodName: "db-0"}}},
			{Volume: &volume.Volume{Driver: "native", Target: "/pods/b"}},
		})
	}}
	state := telemetry.NodeState{Drivers: map[string]bool{}, Missing: map[string]bool{}}
	f.measure(t.Context(), &state)
	addSeverities(&state)
	ready, known := state.Drivers["ebs"]
	check.That(t, known && !ready && len(state.Drivers) == 1 && state.Errors == 1, "measured is %+v", state)
	all := shown(f.list())
	check.That(t, len(all) == 1 && !all[0].GetReady() && time.Since(all[0].GetSince().AsTime()) < time.Minute, "shown is %v", all)
	check.Says(t, "the problem", all[0].GetProblem(), "not behind crust-proxy any more", "/pods/a", "pod shop/db-0")
}

// TestLacksGroup: what is not known of the root directory counts as not writable, unless nobody shall write. What is
// known is tested by TestWritableFor.
func TestLacksGroup(t *testing.T) {
	path := filepath.Join(t.TempDir(), "image")
	check.Must(t, os.WriteFile(path, make([]byte, 8<<20), 0o600))
	d := &disks{reader: ondisk.New()}
	for _, readOnly := range []bool{false, true} {
		v := &volume.Volume{Key: "blank", Device: claim.Identify(path), FSType: "ext4", Group: "2000", ReadOnly: readOnly}
		check.That(t, d.LacksGroup(v) != readOnly, "nothing is known of a blank device, read-only: %v", readOnly)
	}
}

// TestWhatIsToldOfTheEnd of a volume and of the VMs that kept it.
func TestWhatIsToldOfTheEnd(t *testing.T) {
	path, raw := filepath.Join(t.TempDir(), "image"), make([]byte, 8192)
	copy(raw[1024:], []byte{1, 0, 0, 0, 1})               // inodes, blocks
	copy(raw[1024+0x38:], []byte{0x53, 0xef, 2, 0, 1, 0}) // an ext4 with errors
	check.Must(t, os.WriteFile(path, raw, 0o600))
	d := &daemon{
		metrics: telemetry.NewMetrics("v"), history: history.Open(t.TempDir(), nil, zap.NewNop()), log: zap.NewNop(), disks: &disks{reader: ondisk.New()},
	}
	defer d.history.Close()
	o, v := volumeObserver{d}, &volume.Volume{Key: "k", Device: claim.Identify(path), FSType: "ext4", Driver: "ebs", Handler: "kata"}
	o.Published(v)
	series := fmt.Sprint(check.Value(d.metrics.Registry.Gather())(t))
	check.Says(t, "the metrics, which begin at the first event,", series, "crust_proxy_volumes_left_with_errors_total", "crust_proxy_orphans_total")
	check.Eventually(t, "it is read", func() bool { return d.disks.reader.Super(v, time.Hour) != nil })
	o.Leaving(v)
	o.OrphanEnded(v, deferral.Orphan{PID: 7, Program: "qemu", Sandbox: "sb"}, "Admin API, uid 0", nil)
	o.OrphanEnded(v, deferral.Orphan{PID: 7, Program: "qemu", Sandbox: "sb"}, "crust-proxy", unix.EPERM)
	o.OrphanEnded(v, deferral.Orphan{}, "crust-proxy", unix.EPERM)
	var told []string
	for _, e := range d.history.List(func(*adminv1.VolumeEvent) bool { return true }, 9) {
		told = append(told, e.GetWhat()+" by "+e.GetBy()+": "+e.GetText())
	}
	check.Equal(t, strings.Join(told, "\n"), `end failed by crust-proxy: a process that could not be examined: operation not permitted
end failed by crust-proxy: process 7 ("qemu") of sandbox sb: operation not permitted
ended by Admin API, uid 0: process 7 ("qemu") of sandbox sb
left with errors by crust-proxy: ext4: the filesystem has errors on record: run e2fsck while no pod has the volume`, "what is told")
}

// boundHandler has every volume in one sandbox.
type boundHandler struct {
	idleHandler
	sandbox string
	adopted bool
}

func (h *boundHandler) AdoptForeign() { h.adopted = true }

func (h *boundHandler) Binding(*volume.Volume) (runtime.Binding, bool) {
	return runtime.Binding{Sandbox: h.sandbox}, h.sandbox != ""
}

func (h *boundHandler) Stats(context.Context, *volume.Volume) (volume.Report, error) {
	return volume.Report{Sandbox: h.sandbox}, nil
}

// Nobody but its handler tells that a volume of another program is gone.
func TestNothingIsKeptOfAForeignVolumeThatIsGone(t *testing.T) {
	handler := &boundHandler{sandbox: "sb1"}
	broker := check.Value(deferral.NewBroker(deferral.Config{
		StateDir: t.TempDir(), Root: t.TempDir(), Handlers: []deferral.Projector{handler}, DefaultHandler: "kata",
	}))(t)
	t.Cleanup(broker.Close)
	relay := stats.New(stats.Limits{Concurrency: 1, MaxSlow: 1, StatsTimeout: time.Minute}, nil)
	d := &daemon{
		handlers: sandboxes.Handlers{handler}, broker: broker, sandboxes: &sandboxes.Sandboxes{Relay: relay}, hub: admin.NewHub(),
		disks: &disks{reader: ondisk.New()}, log: zap.NewNop(),
	}
	// The watch, which finds such volumes too, begins beside the servers.
	err := d.loadRecords(t.Context())
	check.That(t, err == nil && handler.adopted, "volumes of other programs are not known before anything is served: %v", err)
	v := &volume.Volume{Key: "a", Adopted: true}
	check.Value(relay.Stats(t.Context(), handler, v))(t)
	d.onSandboxChanged("b")
	_, ok := relay.Known("a")
	check.That(t, ok, "nothing is known of a volume that is there")
	handler.sandbox = ""
	d.onSandboxChanged("a")
	known, ok := relay.Known("a")
	check.That(t, !ok, "of a volume that is gone is kept: %+v", known)
}

// TestLookAtHostMountsIsShared: the mount table is read once for all volumes and all
// who ask at a time, and a caller who goes away waits no longer.
func TestLookAtHostMountsIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		looks, goOn := 0, make(chan struct{})
		h := &hostMounts{volumes: func() iter.Seq[deferral.Status] {
			looks++
			<-goOn
			return slices.Values(mountedVolumes(t))
		}}
		gone, leave := context.WithCancel(t.Context())
		left := make(chan []string, 1)
		go func() { _, warned := h.findings(gone); left <- warned }()
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				found, warnings := h.findings(t.Context())
				check.That(t, len(found) == 2 && len(warnings) == 0 && strings.HasPrefix(found[0], "volume /pods/a/mount: ") &&
					strings.Contains(found[1], "is mounted on the host at /proc") && strings.Contains(found[1], "unmount it"), "found %q", found)
			})
		}
		synctest.Wait()
		leave()
		warned := <-left
		check.That(t, len(warned) == 1 && strings.Contains(warned[0], "is not known whether"), "a caller who waits no longer is told %q", warned)
		close(goOn)
		all.Wait()
		check.That(t, looks == 1, "%d looks for 9 callers of one moment", looks)
	})
}

// mountedVolumes are two volumes of one device, which is that of /proc, and one of a device that is mounted nowhere.
func mountedVolumes(t *testing.T) []deferral.Status {
	var st unix.Stat_t
	check.Must(t, unix.Stat("/proc", &st))
	status := func(target string, major, minor uint32) deferral.Status {
		return deferral.Status{Volume: &volume.Volume{
			Key: volume.KeyOf(target), Target: target,
			Device: volume.Device{Kind: volume.BlockDevice, Path: "/dev/x", Major: major, Minor: minor},
		}}
	}
	major, minor := unix.Major(st.Dev), unix.Minor(st.Dev)
	return []deferral.Status{status("/pods/a/mount", major, minor), status("/pods/b/mount", major, minor), status("/pods/c/mount", 4095, 1)}
}

// TestLookAtHostMountsEndsInTime: an ended context ends the look at the table.
func TestLookAtHostMountsEndsInTime(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	h := &hostMounts{volumes: func() iter.Seq[deferral.Status] { return slices.Values(mountedVolumes(t)) }}
	check.Fails(t, check.Err(h.scan(ctx))) // or the mount table was read for a caller who has gone
}
