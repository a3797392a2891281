package daemon

import (
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/sandbox"
)

func TestTheConfigurationSaysWhoTellsOfSandboxes(t *testing.T) {
	cfg := config.Default()
	if tracker := newTracker(&cfg, sandbox.Config{}, zap.NewNop()); !strings.HasPrefix(tracker.LastError().Error(), "containerd at ") {
		t.Errorf("by default it is %v", tracker.LastError())
	}
	cfg.Containerd.Socket = ""
	if tracker := newTracker(&cfg, sandbox.Config{}, zap.NewNop()); tracker != nil {
		t.Errorf("nobody is configured, and there is %T", tracker)
	}
	cfg.CRI.Socket = "/run/crio/crio.sock"
	if tracker := newTracker(&cfg, sandbox.Config{}, zap.NewNop()); !strings.HasPrefix(tracker.LastError().Error(), "the container runtime at /run/crio/") {
		t.Errorf("with a CRI socket it is %v", tracker.LastError())
	}
}

// polling is a tracker whose container runtime offers no events.
type polling struct {
	tracker
	is bool
}

func (p polling) Polled() bool { return p.is }
func (polling) Ready() bool    { return true }

func TestPollingIsAFinding(t *testing.T) {
	if got := (followed{polling{}}).findings(); len(got) != 0 {
		t.Errorf("with events: %q", got)
	}
	if got := (followed{polling{is: true}}).findings(); len(got) != 1 || !strings.Contains(got[0], "enable_pod_events = true") {
		t.Errorf("without events: %q", got)
	}
}
