package daemon

import (
	"context"
	"maps"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/observe"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// scrapeTime bounds what a scrape asks of the handlers.
const scrapeTime = 2 * time.Second

// nodeState is what findings tells in words, for metrics.
func (d *daemon) nodeState() observe.NodeState {
	state := observe.NodeState{
		ConfigGood: d.badConfig.Load() == nil, BadRecords: len(d.broker.Problems()),
		Sources: make(map[string]bool), Handlers: make(map[string]bool), Drivers: make(map[string]bool),
		Abnormal: d.countAbnormal(),
	}
	if d.tracker != nil {
		state.Sources["sandboxes"] = d.tracker.Ready()
	}
	if d.cluster != nil {
		maps.Copy(state.Sources, d.cluster.State().Synced)
	}
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTime)
	defer cancel()
	for _, handler := range d.handlers {
		state.Handlers[handler.Name()] = handler.Health(ctx) == nil
	}
	if d.drivers != nil {
		for _, driver := range d.drivers.List() {
			// A second registrar of the same name is refused and does no harm.
			state.Drivers[driver.Name] = state.Drivers[driver.Name] || driver.Ready
		}
	}
	return state
}

func (d *daemon) countAbnormal() []observe.VolumeCount {
	var out []observe.VolumeCount
	for _, status := range d.node.List() {
		if d.isAbnormal(status.Key) {
			out = append(out, observe.VolumeCount{Driver: status.Driver, Handler: status.Handler, Count: 1})
		}
	}
	return out
}

// isAbnormal goes by what the sandbox said last; it is asked whenever kubelet asks
// for stats.
func (d *daemon) isAbnormal(key deferral.Key) bool {
	known, ok := d.relay.Known(key)
	return ok && known.Condition != nil && known.Condition.Abnormal
}
