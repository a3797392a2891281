// Package sandboxes calls the sandboxes of volumes, for the front and for the APIs.
package sandboxes

import (
	"context"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Handlers are the runtime handlers of this node.
type Handlers []runtime.Handler

// Adopted lists the volumes that other programs published.
func (all Handlers) Adopted() (out []*volume.Volume) {
	for _, h := range all {
		out = append(out, h.Adopted()...)
	}
	return out
}

// Binding returns the sandbox that has a volume, from memory of its handler, or of all if only its key is known.
func (all Handlers) Binding(v *volume.Volume) (runtime.Binding, bool) {
	for _, h := range all {
		if v.Handler != "" && h.Name() != v.Handler {
			continue
		}
		if binding, bound := h.Binding(v); bound {
			return binding, true
		}
	}
	return runtime.Binding{}, false
}

// Sandboxes calls the sandboxes of volumes.
type Sandboxes struct {
	Handlers
	Relay *stats.Relay
	// EndGrowth records that a growth is done, as the broker does.
	EndGrowth func(key volume.Key, size int64) error
	// HasGrown reports whether the growth on record for a volume is known to be done.
	HasGrown func(v *volume.Volume) bool
	// Missing is the kind of the error for a volume whose handler is not configured any more.
	Missing volume.Kind
}

// Handler returns the handler of a volume.
func (s *Sandboxes) Handler(v *volume.Volume) (runtime.Handler, error) {
	for _, h := range s.Handlers {
		if h.Name() == v.Handler {
			return h, nil
		}
	}
	return nil, volume.Errorf(s.Missing, "volume %s: its runtime handler %q is not configured any more", v.Target, v.Handler)
}

// Known returns the last answer of the sandbox of a volume.
func (s *Sandboxes) Known(v *volume.Volume) (stats.Known, bool) { return s.Relay.Known(v.Key) }

// MayRun reports whether a sandbox has a volume. What cannot be found out counts as one.
func (s *Sandboxes) MayRun(ctx context.Context, v *volume.Volume) bool {
	handler, err := s.Handler(v)
	if err != nil {
		return true
	}
	sandbox, err := handler.InUse(ctx, v)
	return err != nil || sandbox != ""
}

// Stats asks the sandbox of a volume now.
func (s *Sandboxes) Stats(ctx context.Context, v *volume.Volume) (stats.Answer, error) {
	handler, err := s.Handler(v)
	if err != nil {
		return stats.Answer{}, err
	}
	answer, err := s.Relay.Stats(ctx, handler, v)
	if err == nil && v.GrowTo > 0 {
		s.endGrowth(ctx, handler, v, answer.Sandbox)
	}
	telemetry.CallFrom(ctx).Expected = err != nil && volume.KindOf(err) == volume.NoSandbox
	return answer, err
}

// endGrowth removes a growth from the record when it is done. A sandbox that was mounting
// the volume when the device grew may have seen the old size, so each is asked to grow.
func (s *Sandboxes) endGrowth(ctx context.Context, handler runtime.Handler, v *volume.Volume, sandbox string) {
	if s.HasGrown(v) {
		_ = s.EndGrowth(v.Key, v.GrowTo) // the next stats try again, and only people read it
		return
	}
	if !handler.Abilities().GrowsAtMount {
		return
	}
	if end, first := s.Relay.BeginAttempt(v.Key, sandbox, v.GrowTo); first {
		go func() {
			pause := time.Minute
			_, err := s.Expand(context.WithoutCancel(ctx), v, volume.Range{Required: v.GrowTo}) // the relay keeps the error
			if volume.KindOf(err) == volume.Unsupported {
				pause = 24 * time.Hour
			}
			time.AfterFunc(pause, end)
		}()
	}
}

// Expand asks the sandbox of a volume to grow the filesystem.
func (s *Sandboxes) Expand(ctx context.Context, v *volume.Volume, wish volume.Range) (int64, error) {
	handler, err := s.Handler(v)
	if err != nil {
		return 0, err
	}
	size, err := s.Relay.Expand(ctx, handler, v, wish)
	if err == nil && v.GrowTo > 0 && size >= v.GrowTo {
		_ = s.EndGrowth(v.Key, v.GrowTo) // otherwise the next stats do it
	}
	return size, err
}
