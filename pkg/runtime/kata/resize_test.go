package kata

import (
	"errors"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/kataemu"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

func TestResizeWhereTheAgentCannot(t *testing.T) {
	for _, flavor := range []kataemu.Flavor{kataemu.Go, kataemu.Rust} {
		b := newBench(t, flavor)
		v := published(t, b, "a")
		shim := b.startShim(t, v, "sb1")
		_, err := b.h.Resize(t.Context(), v, deferral.Range{Required: 1 << 30})
		wantError(t, err, deferral.Unsupported, v, "sb1", "resize_volume is not implemented", "delete the pod")
		shim.SetFault(kataemu.NotFound)
		_, err = b.h.Resize(t.Context(), v, deferral.Range{Required: 1 << 30})
		wantError(t, err, deferral.Unsupported, v, "sb1", "delete the pod")
		shim.SetFault(kataemu.ServerError)
		_, err = b.h.Resize(t.Context(), v, deferral.Range{Required: 1 << 30})
		wantError(t, err, deferral.Refused, v, "sb1", "ill")
	}
}

// A future agent that can is believed.
func TestResizeWhereTheAgentCan(t *testing.T) {
	for _, flavor := range []kataemu.Flavor{kataemu.Go, kataemu.Rust} {
		b := newBench(t, flavor)
		var asked uint64
		var answer error
		b.resize = func(_ string, size uint64) error { asked = size; return answer }
		v := published(t, b, "a")
		b.startShim(t, v, "sb1")
		size, err := b.h.Resize(t.Context(), v, deferral.Range{Required: 1 << 30, Limit: 2 << 30})
		if err != nil || size != 1<<30 || asked != 1<<30 {
			t.Errorf("%d, %v; the agent was asked for %d", size, err, asked)
		}
		b.h.cfg.DeviceSize = func(*deferral.Volume) (int64, bool) { return 5 << 30, true }
		if size, err := b.h.Resize(t.Context(), v, deferral.Range{}); err != nil || size != 5<<30 || asked != 5<<30 {
			t.Errorf("to the device's size: %d, %v", size, err)
		}
		answer = errors.New("the guest's disk is ill")
		_, err = b.h.Resize(t.Context(), v, deferral.Range{Required: 1})
		wantError(t, err, deferral.Refused, v, "sb1", "ill")
	}
}

func TestResizeRange(t *testing.T) {
	b := newBench(t, kataemu.Go)
	v := published(t, b, "a")
	for _, r := range []deferral.Range{{}, {Limit: 1}, {Required: -1}, {Required: 2, Limit: 1}} {
		_, err := b.h.Resize(t.Context(), v, r)
		wantError(t, err, deferral.Invalid, v)
	}
}

func TestStatsLargerThanTheDevice(t *testing.T) {
	b := newBench(t, kataemu.Go)
	b.h.cfg.DeviceSize = func(*deferral.Volume) (int64, bool) { return 4096, true }
	v := published(t, b, "a")
	b.startShim(t, v, "sb1")
	_, err := b.h.Stats(t.Context(), v)
	wantError(t, err, deferral.Absurd, v, "sb1", "on a device of 4096")
}
