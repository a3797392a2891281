package kata

import (
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// The agent's word is a constant, unless it says that something is wrong.
func TestConditionIsNotTheAgents(t *testing.T) {
	for _, flavor := range []kataemu.Flavor{kataemu.Go, kataemu.Rust} {
		b := newBench(t, flavor)
		v := published(t, b, "a")
		shim := b.startShim(t, v, "sb1")
		report, err := b.h.Stats(t.Context(), v)
		if err != nil || report.Condition != nil {
			t.Errorf("%v: %+v, %v", flavor, report.Condition, err)
		}
		b.h.cfg.Disks = &fakeDisks{condition: &volume.Condition{Abnormal: true, Message: "run e2fsck"}}
		report, err = b.h.Stats(t.Context(), v)
		if err != nil || report.Condition == nil || report.Condition.Message != "run e2fsck" {
			t.Errorf("%v: %+v, %v", flavor, report.Condition, err)
		}
		if flavor == kataemu.Rust {
			continue
		}
		shim.SetBody([]byte(`{"usage":[{"total":2,"used":1,"unit":1}],"volume_condition":{"abnormal":true,"message":"the agent learned"}}`))
		report, err = b.h.Stats(t.Context(), v)
		if err != nil || report.Condition == nil || report.Condition.Message != "the agent learned" {
			t.Errorf("%+v, %v", report.Condition, err)
		}
	}
}
