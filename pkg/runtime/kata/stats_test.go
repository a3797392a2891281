package kata

import (
	"errors"
	"sync/atomic"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/handlers"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// The agent's word is a constant, unless it says that something is wrong.
func TestConditionIsNotTheAgents(t *testing.T) {
	for _, flavor := range []kataemu.Flavor{kataemu.Go, kataemu.Rust} {
		b, v := publishedBench(t, flavor)
		shim := b.startShim(t, v, "sb1")
		report, err := b.h.Stats(t.Context(), v)
		check.That(t, err == nil && report.Condition == nil, "%v: %+v, %v", flavor, report.Condition, err)
		b.h.cfg.Disks = &fakeDisks{condition: &volume.Condition{Abnormal: true, Message: "run e2fsck"}}
		report, err = b.h.Stats(t.Context(), v)
		check.That(t, err == nil && report.Condition != nil && report.Condition.Message == "run e2fsck", "%v: %+v, %v", flavor, report.Condition, err)
		if flavor == kataemu.Rust {
			continue
		}
		shim.SetBody([]byte(`{"usage":[{"total":2,"used":1,"unit":1}],"volume_condition":{"abnormal":true,"message":"the agent learned"}}`))
		report, err = b.h.Stats(t.Context(), v)
		check.That(t, err == nil && report.Condition != nil && report.Condition.Message == "the agent learned", "%+v, %v", report.Condition, err)
	}
}

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
			b, v := publishedBench(t, c.flavor)
			v.Group, v.Origin = c.group, &volume.Origin{PodNamespace: "ns", PodName: "web"}
			b.startShim(t, v, "sb1")
			core, logs := observer.New(zap.WarnLevel)
			b.h.log = zap.New(core)
			b.h.cfg.Disks = &fakeDisks{lacks: c.lacks}
			for range 2 {
				report, err := b.h.Stats(t.Context(), v)
				check.Require(t, err == nil && report.GroupIgnored == c.ignored, "%+v, %v", report, err)
			}
			said := logs.FilterMessage(runtime.GroupIgnored).FilterField(zap.String("pod", "ns/web")).FilterField(zap.String("target", v.Target)).FilterField(zap.String("group", "2000"))
			check.That(t, (said.Len() == 1) == c.ignored && said.Len() <= 1, "said: %+v", logs.All())
		})
	}
}

// arriving is a container runtime in which something happens when it is asked for a pod's sandboxes.
type arriving struct {
	*fakeSandboxes
	arrives func()
}

func (a *arriving) OfPod(pod string) []string {
	ids := a.fakeSandboxes.OfPod(pod)
	a.arrives()
	return ids
}

// A growth of the volume would be refused for good.
func TestSandboxThatComesWhileNoneIsFoundStaysKnown(t *testing.T) {
	b, v := publishedBench(t, kataemu.Go)
	b.h.bindings.sandboxes = &arriving{b.fakeSandboxes, func() { b.h.store.Bindings.Bind(v.Key, "sb1", string(goShim)) }}
	check.That(t, volume.KindOf(check.Err(b.h.Stats(t.Context(), v))) == volume.NoSandbox, "a sandbox that does not listen was found")
	check.That(t, handlers.BoundTo(b.h, v, "sb1"), "the sandbox is forgotten")
}

func TestResizeWhereTheAgentCannot(t *testing.T) {
	b := newBench(t, kataemu.Go)
	able := b.h.Abilities() // the front refuses by these what Kata cannot do
	check.That(t, !able.GrowsAtMount && !able.SubPaths, "Kata is said to be able to: %+v", able)
	v := published(t, b, "a")
	shim := b.startShim(t, v, "sb1")
	_, err := b.h.Resize(t.Context(), v, volume.Range{Required: 1 << 30})
	handlers.WantError(t, err, volume.Unsupported, v, "sb1", "resize_volume is not implemented", "cannot grow a filesystem")
	check.That(t, errors.Is(err, volume.ErrNeverGrows), "it counts as a growth of this volume that failed")
	shim.SetFault(kataemu.NotFound)
	_, err = b.h.Resize(t.Context(), v, volume.Range{Required: 1 << 30})
	handlers.WantError(t, err, volume.Unsupported, v, "sb1", "cannot grow a filesystem")
	shim.SetFault(kataemu.ServerError)
	handlers.WantError(t, check.Err(b.h.Resize(t.Context(), v, volume.Range{Required: 1 << 30})), volume.Refused, v, "sb1", "ill")
}

// runtime-rs closes the connection where it means "error". That is final, and the guest is asked once.
func TestResizeThatIsHungUpOn(t *testing.T) {
	b := newBench(t, kataemu.Rust)
	var asked atomic.Int32
	b.resize = func(string, uint64) error {
		asked.Add(1)
		return errors.New("resize_volume is not implemented in kata-agent")
	}
	v := published(t, b, "a")
	shim := b.startShim(t, v, "sb1")
	for range 2 { // the second time the path is known
		b.stats(t, v)
		asked.Store(0)
		_, err := b.h.Resize(t.Context(), v, volume.Range{Required: 1 << 30})
		handlers.WantError(t, err, volume.Unsupported, v, "sb1", "kata-rs", "without an answer", "cannot grow a filesystem")
		check.Equal(t, asked.Load(), 1, "requests to the guest")
	}
	b.resize = nil
	check.Must(t, shim.Stop())
	handlers.WantError(t, check.Err(b.h.Resize(t.Context(), v, volume.Range{Required: 1 << 30})), volume.NoSandbox, v, "sb1")
}

// A future agent that can is believed.
func TestResizeWhereTheAgentCan(t *testing.T) {
	for _, flavor := range []kataemu.Flavor{kataemu.Go, kataemu.Rust} {
		b := newBench(t, flavor)
		var asked uint64
		var answer error
		b.resize = func(_ string, size uint64) error { asked = size; return answer }
		v := published(t, b, "a", func(v *volume.Volume) { b.sized(t, v, 5<<30) })
		b.startShim(t, v, "sb1")
		size, err := b.h.Resize(t.Context(), v, volume.Range{Required: 1 << 30, Limit: 2 << 30})
		check.That(t, err == nil && size == 1<<30 && asked == 1<<30, "%d, %v; the agent was asked for %d", size, err, asked)
		size, err = b.h.Resize(t.Context(), v, volume.Range{})
		check.That(t, err == nil && size == 5<<30 && asked == 5<<30, "to the device's size: %d, %v", size, err)
		answer = errors.New("the guest's disk is ill")
		_, err = b.h.Resize(t.Context(), v, volume.Range{Required: 1})
		if flavor == kataemu.Go {
			handlers.WantError(t, err, volume.Refused, v, "sb1", "ill")
		} else {
			handlers.WantError(t, err, volume.Unsupported, v, "sb1", "without an answer")
		}
	}
}

func TestResizeRange(t *testing.T) {
	b, v := publishedBench(t, kataemu.Go)
	for _, r := range []volume.Range{{}, {Limit: 1}} {
		handlers.WantError(t, check.Err(b.h.Resize(t.Context(), v, r)), volume.Invalid, v)
	}
}

func TestStatsLargerThanTheDevice(t *testing.T) {
	b := newBench(t, kataemu.Go)
	v := published(t, b, "a", func(v *volume.Volume) { b.sized(t, v, 4096) })
	b.startShim(t, v, "sb1")
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.Absurd, v, "sb1", "on a device of 4096")
}
