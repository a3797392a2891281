package daemon

import (
	"context"

	"github.com/crust-proxy/crust-proxy/internal/daemon/admin"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// sandboxes asks the sandboxes of volumes for the front. A volume whose handler is not
// configured any more counts as one without a sandbox.
type sandboxes struct{ node *admin.Node }

// Stats asks the sandbox now.
func (s sandboxes) Stats(ctx context.Context, v *volume.Volume) (stats.Answer, error) {
	return s.node.Stats(ctx, v, volume.NoSandbox)
}

// Known returns the last answer of the sandbox.
func (s sandboxes) Known(v *volume.Volume) (stats.Known, bool) { return s.node.Relay.Known(v.Key) }

// Expand asks the sandbox to grow the filesystem.
func (s sandboxes) Expand(ctx context.Context, v *volume.Volume, wish volume.Range) (int64, error) {
	handler, err := s.node.HandlerOf(v, volume.NoSandbox)
	if err != nil {
		return 0, err
	}
	return s.node.Relay.Expand(ctx, handler, v, wish)
}
