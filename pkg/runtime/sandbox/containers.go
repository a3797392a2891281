package sandbox

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// sandboxAnnotation names a container's sandbox in its spec. Newer versions can
// tell it in a field of the container too: 1.6 never does, 1.7 only for a shim
// that is a sandbox by itself.
const sandboxAnnotation = "io.kubernetes.cri.sandbox-id"

// maxSpec bounds a container's spec.
const maxSpec = 8 << 20

// spec is the part of an OCI spec that matters.
type spec struct {
	Annotations map[string]string `json:"annotations"`
	Mounts      []struct {
		Source      string `json:"source"`
		Destination string `json:"destination"`
	} `json:"mounts"`
}

// ContainerIDs lists the containers of a sandbox, and the sandbox's own.
func (t *Tracker) ContainerIDs(ctx context.Context, sandboxID string) ([]string, error) {
	ids := []string{sandboxID}
	err := t.inSandbox(ctx, sandboxID, func(c *containersapi.Container, _ spec) { ids = append(ids, c.GetID()) })
	return ids, err
}

// Destinations lists where the containers of a sandbox mount source, without
// repeats.
func (t *Tracker) Destinations(ctx context.Context, sandboxID, source string) ([]string, error) {
	var found []string
	pod, _ := t.PodOf(sandboxID)
	err := t.inSandbox(ctx, sandboxID, func(_ *containersapi.Container, s spec) {
		for _, mount := range s.Mounts {
			if isSource(pod, mount.Source, source) && !slices.Contains(found, mount.Destination) {
				found = append(found, mount.Destination)
			}
		}
	})
	return found, err
}

// inSandbox calls f with the containers of a sandbox.
func (t *Tracker) inSandbox(ctx context.Context, sandboxID string, f func(*containersapi.Container, spec)) error {
	c := t.current()
	if c == nil {
		return deferral.Errorf(deferral.NoSandbox, "sandbox %s: its containers cannot be looked up now: %w", sandboxID, t.LastError())
	}
	pod, known := t.PodOf(sandboxID)
	if !known {
		return deferral.Errorf(deferral.NoSandbox, "containerd has no live sandbox %s", sandboxID)
	}
	err := c.each(ctx, fmt.Sprintf("labels.%q==%s", podLabel, pod), func(container *containersapi.Container) {
		if container.GetLabels()[kindLabel] == kindSandbox || !idForm.MatchString(container.GetID()) {
			return
		}
		if s, ok := t.readSpec(container); ok && belongs(container, s, sandboxID) {
			f(container, s)
		}
	})
	if err != nil {
		return askError(ctx, t.party, sandboxID, err)
	}
	return nil
}

// readSpec reads a container's spec; one that cannot be read says nothing. The
// log tells its size only: a spec holds the environment, and that holds secrets.
func (t *Tracker) readSpec(c *containersapi.Container) (spec, bool) {
	var s spec
	raw := c.GetSpec().GetValue()
	if len(raw) > maxSpec || json.Unmarshal(raw, &s) != nil {
		t.log.Warn("a container's spec cannot be read", zap.String("id", c.GetID()), zap.Int("bytes", len(raw)))
		return spec{}, false
	}
	return s, true
}

func belongs(c *containersapi.Container, s spec, sandboxID string) bool {
	if c.GetSandbox() != "" {
		return c.GetSandbox() == sandboxID
	}
	return s.Annotations[sandboxAnnotation] == sandboxID
}
