package kata

import (
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// TestGroupIgnored: stats from runtime-rs say that the volume's group has no effect, and
// the log does once, unless the root directory is the group's.
func TestGroupIgnored(t *testing.T) {
	for name, c := range map[string]struct {
		flavor  kataemu.Flavor
		group   string
		lacks   bool
		ignored bool
	}{
		"runtime-rs":               {kataemu.Rust, "2000", true, true},
		"runtime-rs, group's root": {kataemu.Rust, "2000", false, false},
		"runtime-rs, no group":     {kataemu.Rust, "", true, false},
		"Go":                       {kataemu.Go, "2000", true, false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, c.flavor)
			v := published(t, b, "a")
			v.Group, v.Origin = c.group, &volume.Origin{PodNamespace: "ns", PodName: "web"}
			b.startShim(t, v, "sb1")
			core, logs := observer.New(zap.WarnLevel)
			b.h.log = zap.New(core)
			b.h.cfg.Disks = &fakeDisks{lacks: c.lacks}
			for range 2 {
				report, err := b.h.Stats(t.Context(), v)
				if err != nil || report.GroupIgnored != c.ignored {
					t.Fatalf("%+v, %v", report, err)
				}
			}
			said := logs.FilterMessage(volume.GroupIgnoredText).FilterField(zap.String("pod", "ns/web")).FilterField(zap.String("group", "2000"))
			if (said.Len() == 1) != c.ignored || said.Len() > 1 {
				t.Errorf("said: %+v", logs.All())
			}
		})
	}
}
