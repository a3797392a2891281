package admin

import (
	"context"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// growing is a handler that tells what it was asked to grow to.
type growing struct {
	adopting
	asked chan int64
}

func (g *growing) Abilities() deferral.Abilities { return deferral.Abilities{GrowsAtMount: true} }

func (g *growing) Resize(_ context.Context, _ *volume.Volume, r volume.Range) (int64, error) {
	g.asked <- r.Required
	return r.Required, nil
}

// A sandbox that was mounting the volume while it was expanded had not left its id, so
// that the growth was put on record, and may have looked at the device before it grew.
func TestGrowthThatTheMountMissed(t *testing.T) {
	s := serve(t)
	handler, grown := &growing{asked: make(chan int64, 8)}, false
	broker, err := deferral.NewBroker(deferral.Config{
		StateDir: t.TempDir(), Root: t.TempDir(), Handlers: []deferral.Projector{handler}, DefaultHandler: "kata",
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(broker.Close)
	calls := s.node.Sandboxes
	calls.Broker, calls.Handlers[0] = broker, handler
	calls.HasGrown = func(context.Context, *volume.Volume) bool { return grown }
	v := &volume.Volume{Key: "a", Handler: "kata", GrowTo: 7}
	ask := func() {
		t.Helper()
		if _, err := calls.Stats(t.Context(), v); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		ask()
	}
	select {
	case size := <-handler.asked:
		if size != 7 {
			t.Errorf("it was asked to grow to %d", size)
		}
	case <-time.After(20 * time.Second):
		t.Error("the sandbox was not asked to grow")
	}
	calls.Relay.Rebound("a", "next")
	grown = true
	ask()
	if n := len(handler.asked); n != 0 {
		t.Errorf("it was asked %d times more", n)
	}
}
