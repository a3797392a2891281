package sandbox

import (
	"context"
	"fmt"

	sandboxapi "github.com/containerd/containerd/api/services/sandbox/v1"
	"go.uber.org/zap"
)

// podSandboxer is the controller whose sandboxes are containers. Versions that
// know no other do not name it.
const podSandboxer = "podsandbox"

// warnOfOthers says once when containerd has sandboxes without a container, which
// are not seen here: nobody should have to find out by missing them.
func (f *follower) warnOfOthers(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	name, err := f.c.otherSandboxer(ctx)
	if err != nil {
		f.t.log.Debug("containerd does not tell of its sandboxers", zap.Error(err))
		return
	}
	if name != "" && !f.warned.Swap(true) {
		f.t.log.Warn("containerd has sandboxes that are not containers, and they are not followed; "+
			"to follow all, set containerd.socket to \"\" and cri.socket to containerd's socket",
			zap.String("sandboxer", name), zap.String("runtime", f.t.party))
	}
}

// otherSandboxer names a controller, other than the usual one, that has a
// sandbox. Containerd 1.6 has no such list.
func (c *client) otherSandboxer(ctx context.Context) (string, error) {
	reply, err := c.sandboxes.List(c.in(ctx), &sandboxapi.StoreListRequest{})
	if err != nil {
		return "", fmt.Errorf("containerd: list sandboxes: %w", err)
	}
	for _, s := range reply.GetList() {
		if name := s.GetSandboxer(); name != "" && name != podSandboxer {
			return clip(name), nil
		}
	}
	return "", nil
}
