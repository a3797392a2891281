package csi

import (
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// TestHazardsAreNamedBeforehand: what runtime-rs does wrong is in the log with pod and
// containers, once, where the pod's runtime is or may be runtime-rs.
func TestHazardsAreNamedBeforehand(t *testing.T) {
	const twice, paths, space = "attached a second time", "at several paths", "has a space"
	shared := one(decision.PodVolume{Together: []string{"app", "sidecar"}})
	for name, c := range map[string]struct {
		pod        decision.Pod
		handler    string
		says       string
		containers []string
	}{
		"two containers":          {pod: decision.Pod{RuntimeHandler: "kata-qemu-runtime-rs", Volumes: shared}, says: twice, containers: []string{"app", "sidecar"}},
		"by two names":            {pod: decision.Pod{RuntimeHandler: "kata", Volumes: append(one(decision.PodVolume{Together: []string{"b"}}), decision.PodVolume{Name: "x", Driver: driverName, VolumeID: "vol-1", Together: []string{"a"}})}, says: twice, containers: []string{"a", "b"}},
		"the default runtime":     {pod: decision.Pod{Volumes: shared}, says: twice, containers: []string{"app", "sidecar"}},
		"a container's two paths": {pod: decision.Pod{RuntimeHandler: "kata-qemu-runtime-rs", Volumes: one(decision.PodVolume{Together: []string{"app"}, Mounts: []string{"setup", "app", "setup"}})}, says: paths, containers: []string{"setup"}},
		"two paths by two names":  {pod: decision.Pod{RuntimeHandler: "kata", Volumes: append(one(decision.PodVolume{Mounts: []string{"a"}}), decision.PodVolume{Name: "x", Driver: driverName, VolumeID: "vol-1", Mounts: []string{"b", "a"}})}, says: paths, containers: []string{"a"}},
		"a space":                 {pod: decision.Pod{RuntimeHandler: "kata-dragonball", Volumes: one(decision.PodVolume{Together: []string{"app"}, Spaced: []string{"app"}})}, says: space, containers: []string{"app"}},
		"the Go runtime":          {pod: decision.Pod{RuntimeHandler: "kata-qemu", Volumes: shared}},
		"another handler":         {pod: decision.Pod{RuntimeHandler: "crust", Volumes: shared}, handler: "crust"},
		"one container":           {pod: decision.Pod{RuntimeHandler: "kata", Volumes: one(decision.PodVolume{Together: []string{"app"}, Mounts: []string{"setup", "app"}})}},
		"another volume's two":    {pod: decision.Pod{RuntimeHandler: "kata", Volumes: append(one(decision.PodVolume{}), decision.PodVolume{Name: "x", Driver: "other", VolumeID: "o", Together: []string{"a", "b"}})}},
	} {
		t.Run(name, func(t *testing.T) {
			c.pod.UID = "p1"
			r := podRig(t, &policy.Policy{Rules: []policy.Rule{{Name: "all", Defer: true, Handler: c.handler}}}, c.pod)
			core, logs := observer.New(zap.WarnLevel)
			r.cfg.Log = zap.New(core)
			r.restart()
			r.stage()
			r.ok(nil, r.publish("p1"))
			r.ok(nil, r.publish("p1")) // kubelet repeats it, and the log is not
			if c.says == "" {
				if logs.Len() != 0 {
					t.Errorf("said: %+v", logs.All())
				}
				return
			}
			said := logs.FilterMessageSnippet(c.says).FilterField(zap.String("pod", "ns/name-of-p1")).FilterField(zap.Strings("containers", c.containers))
			if said.Len() != 1 || logs.Len() != 1 {
				t.Errorf("said: %+v", logs.All())
			}
		})
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
			c.pod.UID, c.pod.Volumes = "p1", one(decision.PodVolume{})
			r := podRig(t, deferAll, c.pod)
			core, logs := observer.New(zap.WarnLevel)
			r.cfg.Log, r.lacks = zap.New(core), c.lacks
			r.restart()
			r.stage()
			r.ok(nil, r.publish("p1"))
			r.ok(nil, r.publish("p1"))
			said := logs.FilterMessage(volume.GroupIgnoredText).FilterField(zap.String("pod", "ns/name-of-p1")).
				FilterField(zap.String("volume", r.target("p1"))).FilterField(zap.String("group", "2000"))
			if said.Len() != c.says || logs.Len() != c.says {
				t.Errorf("said: %+v", logs.All())
			}
		})
	}
}
