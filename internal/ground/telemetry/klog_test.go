package telemetry

import (
	"errors"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

func TestWhatKubernetesLibrariesSay(t *testing.T) {
	core, logs := observer.New(zap.DebugLevel)
	log := Logr(zap.New(core)).WithName("client").WithValues("node", "n", "odd")
	log.V(2).Info("for their developers")
	log.Info("small talk", "count", 3)
	log.Error(errors.New("gone"), "cannot go on", "what", "pods")
	got := logs.AllUntimed()
	if len(got) != 2 {
		t.Fatalf("%d entries: %+v", len(got), got)
	}
	if got[0].Level != zap.DebugLevel || got[0].Message != "small talk" || got[0].ContextMap()["count"] != int64(3) {
		t.Errorf("got %+v", got[0])
	}
	if fields := got[1].ContextMap(); got[1].Level != zap.WarnLevel || got[1].LoggerName != "client" || fields["error"] != "gone" ||
		fields["what"] != "pods" || fields["node"] != "n" {
		t.Errorf("got %+v", got[1])
	}
}
