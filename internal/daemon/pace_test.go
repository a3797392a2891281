package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/daemon/admin"
	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/daemon/sandboxes"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/systemd"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

const (
	manyVolumes = 10000
	// longestHold is less than the 10 ms after which Go's scheduler steps in by itself.
	longestHold = 8 * time.Millisecond * slower
)

// TestReadsLeaveTheProcessorToCalls: on one processor, as the daemon runs, nothing
// that lists 10,000 volumes keeps a call from its turn for long. Measured is the
// time that this process had the processor, so that a busy machine does not count.
func TestReadsLeaveTheProcessorToCalls(t *testing.T) {
	parts, admin := manyVolumesOnRecord(t)
	defer goruntime.GOMAXPROCS(goruntime.GOMAXPROCS(1))
	ctx := t.Context()
	for name, read := range map[string]func() error{
		"GetNode": func() error { _, err := admin.GetNode(ctx, &adminv1.GetNodeRequest{}); return err },
		"ListVolumes": func() error {
			_, err := admin.ListVolumes(ctx, &adminv1.ListVolumesRequest{PageSize: 5000})
			return err
		},
		"ListHandlers": func() error { _, err := admin.ListHandlers(ctx, &adminv1.ListHandlersRequest{}); return err },
		"GetVolume": func() error {
			_, err := admin.GetVolume(ctx, &adminv1.GetVolumeRequest{Volume: "0000000"})
			_ = err
			return nil
		},
		"the scrape": func() error { parts.state(); return nil },
	} {
		// The collector of garbage can have its turn in one try, not in all.
		best := time.Hour
		for try := 0; try < 10 && best > longestHold; try++ {
			held, err := longestTurn(read)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			best = min(best, held)
		}
		t.Logf("%s keeps the processor for %s", name, best)
		if best > longestHold {
			t.Errorf("%s keeps the processor for %s with %d volumes", name, best, manyVolumes)
		}
	}
}

// longestTurn is the longest time for which f kept the processor while another
// goroutine wanted it every 200 microseconds.
func longestTurn(f func() error) (time.Duration, error) {
	ended, longest := make(chan error, 1), time.Duration(0)
	go func() { ended <- f() }()
	for last := cpuTime(); ; {
		time.Sleep(200 * time.Microsecond)
		now := cpuTime()
		longest, last = max(longest, now-last), now
		select {
		case err := <-ended:
			return longest, err
		default:
		}
	}
}

func cpuTime() time.Duration {
	var at unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &at); err != nil {
		panic(err)
	}
	return time.Duration(at.Nano())
}

// idleHandler has no volume in a sandbox, and none of other programs.
type idleHandler struct{ runtime.Handler }

func (idleHandler) Name() string                                              { return "kata" }
func (idleHandler) Adopted() []*volume.Volume                                 { return nil }
func (idleHandler) Health(context.Context) error                              { return nil }
func (idleHandler) Binding(*volume.Volume) (binding runtime.Binding, is bool) { return }

func (idleHandler) Orphans(func(volume.Key) bool) ([]*volume.Volume, error) {
	return nil, nil
}

// manyVolumesOnRecord is a daemon that has read the records of many volumes. They
// are of an earlier boot, so that no device is needed.
func manyVolumesOnRecord(t *testing.T) (parts, *admin.AdminServer) {
	t.Helper()
	state, kubelet := t.TempDir(), t.TempDir()
	records := filepath.Join(state, "volumes")
	if err := os.MkdirAll(records, 0o700); err != nil {
		t.Fatal(err)
	}
	for n := range manyVolumes {
		target := fmt.Sprintf("%s/pods/%032d/volumes/kubernetes.io~csi/pv-%d/mount", kubelet, n, n)
		key := volume.KeyOf(target)
		raw, err := json.Marshal(map[string]any{
			"version": 1, "boot": "an earlier one", "key": key, "target": target, "resolvedTarget": target, "fsType": "ext4", "handler": "kata",
			"backing": "/dev/vdb", "device": map[string]any{"kind": "block", "path": "/dev/vdb", "major": 253, "minor": n},
		})
		if err == nil {
			err = os.WriteFile(filepath.Join(records, string(key)+".json"), raw, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	handler := idleHandler{}
	broker, err := deferral.NewBroker(deferral.Config{
		StateDir: state, Root: kubelet, Handlers: []deferral.Projector{handler}, DefaultHandler: "kata",
	})
	if err == nil {
		t.Cleanup(broker.Close)
		err = broker.Load(t.Context())
	}
	if err != nil || len(broker.List()) != manyVolumes {
		t.Fatalf("%d volumes are on record: %v", len(broker.List()), err)
	}
	calls := &sandboxes.Sandboxes{
		Handlers: sandboxes.Handlers{handler}, Relay: stats.New(stats.Limits{Concurrency: 1, MaxSlow: 1}, nil), Broker: broker,
	}
	node := &admin.Node{Broker: broker, Sandboxes: calls}
	inForce := &settings{flags: &config.Flags{}}
	inForce.inForce.Store(&config.Config{ReconcileInterval: time.Minute})
	d := &daemon{
		settings: inForce, broker: broker, openers: openers.New(), mounted: &hostMounts{volumes: broker.List}, http: &telemetry.Server{},
	}
	d.parts = parts{
		&volumes{node: node, notify: &systemd.Notifier{}, staged: func() []staging.Staged { return nil }},
		devices{d.openers, broker}, address{d.http}, inForce,
	}
	return d.parts, &admin.AdminServer{Node: node, Daemon: d}
}
