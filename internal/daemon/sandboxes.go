package daemon

import (
	"context"

	"github.com/crust-proxy/crust-proxy/internal/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// sandboxes asks the sandboxes of volumes for the front.
type sandboxes struct {
	handlers map[string]runtime.Handler
	relay    *stats.Relay
}

func (s *sandboxes) handler(v *volume.Volume) (runtime.Handler, error) {
	handler := s.handlers[v.Handler]
	if handler == nil {
		return nil, volume.Errorf(volume.NoSandbox, "volume %s: its runtime handler %q is not configured any more",
			v.Target, v.Handler)
	}
	return handler, nil
}

// Stats asks the sandbox now.
func (s *sandboxes) Stats(ctx context.Context, v *volume.Volume) (stats.Answer, error) {
	handler, err := s.handler(v)
	if err != nil {
		return stats.Answer{}, err
	}
	answer, err := s.relay.Stats(ctx, handler, v)
	telemetry.CallFrom(ctx).Expected = volume.KindOf(err) == volume.NoSandbox && err != nil
	return answer, err
}

// Known is what the sandbox said last.
func (s *sandboxes) Known(v *volume.Volume) (stats.Known, bool) { return s.relay.Known(v.Key) }

// Expand asks the sandbox to grow the filesystem.
func (s *sandboxes) Expand(ctx context.Context, v *volume.Volume, wish volume.Range) (int64, error) {
	handler, err := s.handler(v)
	if err != nil {
		return 0, err
	}
	return s.relay.Expand(ctx, handler, v, wish)
}

// Binding is the sandbox that has the volume, from memory.
func (s *sandboxes) Binding(v *volume.Volume) (runtime.Binding, bool) {
	handler := s.handlers[v.Handler]
	if handler == nil {
		return runtime.Binding{}, false
	}
	return handler.Binding(v)
}
