package daemon

import (
	"testing"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/config"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/sandbox"
)

func TestTheConfigurationSaysWhoTellsOfSandboxes(t *testing.T) {
	d := &daemon{log: zap.NewNop()}
	cfg := config.Default()
	if tracker, ok := d.newTracker(&cfg).(*sandbox.Tracker); !ok || tracker == nil {
		t.Error("by default it is not containerd")
	}
	cfg.Containerd.Socket = ""
	if tracker := d.newTracker(&cfg); tracker != nil {
		t.Errorf("nobody is configured, and there is %T", tracker)
	}
	cfg.CRI.Socket = "/run/crio/crio.sock"
	if tracker, ok := d.newTracker(&cfg).(*sandbox.CRI); !ok || tracker == nil {
		t.Error("with a CRI socket it is not the CRI")
	}
}
