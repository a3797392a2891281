package csi

import (
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// warnings has a pod publish the volume twice, as kubelet does after its restart, and gives
// the warnings that name the pod.
func warnings(t *testing.T, pod decision.Pod, lacksGroup bool) *observer.ObservedLogs {
	t.Helper()
	pod.UID = "p1"
	r := podRig(t, deferAll, pod)
	core, logs := observer.New(zap.WarnLevel)
	r.cfg.Log, r.lacks = zap.New(core), lacksGroup
	r.restart()
	r.stage()
	r.ok(nil, r.publish("p1"))
	r.ok(nil, r.publish("p1"))
	named := logs.FilterField(zap.String("pod", "ns/name-of-p1")).FilterField(zap.String("volume", r.target("p1")))
	if named.Len() != logs.Len() {
		t.Errorf("said: %+v", logs.All())
	}
	return named
}

// TestHazardsAreNamedBeforehand: what runtime-rs does wrong is in the log with pod and
// containers, once.
func TestHazardsAreNamedBeforehand(t *testing.T) {
	logs := warnings(t, decision.Pod{Volumes: one(decision.PodVolume{Together: []string{"app", "sidecar"}})}, false)
	if logs.FilterField(zap.Strings("containers", []string{"app", "sidecar"})).Len() != 1 || logs.Len() != 1 {
		t.Errorf("said: %+v", logs.All())
	}
}

// TestIgnoredGroupIsNamed: the log names pod, volume and group before the pod starts,
// where the runtime handler's name says that it is runtime-rs.
func TestIgnoredGroupIsNamed(t *testing.T) {
	for name, c := range map[string]struct {
		pod   decision.Pod
		lacks bool
		says  int
	}{
		"runtime-rs":               {decision.Pod{RuntimeHandler: "kata-qemu-runtime-rs", FSGroup: "2000"}, true, 1},
		"runtime-rs, group's root": {decision.Pod{RuntimeHandler: "kata-qemu-runtime-rs", FSGroup: "2000"}, false, 0},
		"runtime-rs, no group":     {decision.Pod{RuntimeHandler: "kata-qemu-runtime-rs"}, true, 0},
		"Go":                       {decision.Pod{RuntimeHandler: "kata-qemu", FSGroup: "2000"}, true, 0},
		"not known":                {decision.Pod{FSGroup: "2000"}, true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			logs := warnings(t, c.pod, c.lacks)
			if logs.FilterMessage(volume.GroupIgnoredText).FilterField(zap.String("group", "2000")).Len() != c.says || logs.Len() != c.says {
				t.Errorf("said: %+v", logs.All())
			}
		})
	}
}
