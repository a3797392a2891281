package sandbox

import (
	"context"
	"slices"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// ContainerIDs lists the containers of a sandbox, and the sandbox's own.
func (t *CRI) ContainerIDs(ctx context.Context, sandboxID string) ([]string, error) {
	c, _, err := t.asking(sandboxID)
	if err != nil {
		return []string{sandboxID}, err
	}
	ids, err := c.containers(ctx, sandboxID)
	if err != nil {
		err = askError(ctx, t.party, sandboxID, err)
	}
	return append([]string{sandboxID}, ids...), err
}

// Destinations lists where the containers of a sandbox mount source, without
// repeats.
func (t *CRI) Destinations(ctx context.Context, sandboxID, source string) ([]string, error) {
	c, pod, err := t.asking(sandboxID)
	if err != nil {
		return nil, err
	}
	ids, err := c.containers(ctx, sandboxID)
	if err != nil {
		return nil, askError(ctx, t.party, sandboxID, err)
	}
	var found []string
	for _, id := range ids {
		mounts, err := c.mounts(ctx, id)
		if err != nil {
			return nil, askError(ctx, t.party, sandboxID, err)
		}
		for _, mount := range mounts {
			if isSource(pod, mount.GetHostPath(), source) && !slices.Contains(found, mount.GetContainerPath()) {
				found = append(found, mount.GetContainerPath())
			}
		}
	}
	return found, nil
}

// asking gives the connection by which a live sandbox can be asked about, and
// the sandbox's pod.
func (t *CRI) asking(sandboxID string) (c *criClient, pod string, err error) {
	if c = t.current(); c == nil {
		return nil, "", deferral.Errorf(deferral.NoSandbox, "sandbox %s: its containers cannot be looked up now: %w", sandboxID, t.LastError())
	}
	pod, known := t.PodOf(sandboxID)
	if !known {
		return nil, "", deferral.Errorf(deferral.NoSandbox, "%s has no live sandbox %s", t.party, sandboxID)
	}
	return c, pod, nil
}
