package daemon

import (
	"context"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/daemon/admin"
	"github.com/crust-proxy/crust-proxy/internal/daemon/sandboxes"
	"github.com/crust-proxy/crust-proxy/internal/disk/ondisk"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// boundHandler has every volume in one sandbox.
type boundHandler struct {
	idleHandler
	sandbox string
}

func (h *boundHandler) Binding(*volume.Volume) (runtime.Binding, bool) {
	return runtime.Binding{Sandbox: h.sandbox}, h.sandbox != ""
}

func (h *boundHandler) Stats(context.Context, *volume.Volume) (volume.Report, error) {
	return volume.Report{Sandbox: h.sandbox}, nil
}

// Nobody but its handler tells that a volume of another program is gone.
func TestNothingIsKeptOfAForeignVolumeThatIsGone(t *testing.T) {
	handler := &boundHandler{sandbox: "sb1"}
	broker, err := deferral.NewBroker(deferral.Config{
		StateDir: t.TempDir(), Root: t.TempDir(), Handlers: []deferral.Projector{handler}, DefaultHandler: "kata",
	})
	check.Must(t, err)
	t.Cleanup(broker.Close)
	relay := stats.New(stats.Limits{Concurrency: 1, MaxSlow: 1, StatsTimeout: time.Minute}, nil)
	d := &daemon{
		handlers: sandboxes.Handlers{handler}, broker: broker, sandboxes: &sandboxes.Sandboxes{Relay: relay}, hub: admin.NewHub(),
		disks: &disks{reader: ondisk.New()},
	}
	v := &volume.Volume{Key: "a", Adopted: true}
	_, err = relay.Stats(t.Context(), handler, v)
	check.Must(t, err)
	d.onSandboxChanged("b")
	if _, ok := relay.Known("a"); !ok {
		t.Error("nothing is known of a volume that is there")
	}
	handler.sandbox = ""
	d.onSandboxChanged("a")
	if known, ok := relay.Known("a"); ok {
		t.Errorf("of a volume that is gone is kept: %+v", known)
	}
}
