package sandbox

import (
	"context"
	"encoding/json"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// sandboxAnnotation names a container's sandbox in its spec. Containers that ctr made, or the
// CRI before an upgrade to containerd 2, do not have the field for it.
const sandboxAnnotation = "io.kubernetes.cri.sandbox-id"

const maxSpec = 8 << 20

type spec struct {
	Annotations map[string]string `json:"annotations"`
	Mounts      []mount           `json:"mounts"`
}

type mount struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
}

func (c *client) containerIDs(ctx context.Context, sandboxID, podUID string) (ids []string, err error) {
	err = c.inSandbox(ctx, sandboxID, podUID, func(container *containersapi.Container, _ spec) { ids = append(ids, container.GetID()) })
	return ids, err
}

func (c *client) destinations(ctx context.Context, sandboxID, podUID, path string) (found []string, err error) {
	err = c.inSandbox(ctx, sandboxID, podUID, func(_ *containersapi.Container, s spec) {
		for _, mount := range s.Mounts {
			if isSource(podUID, mount.Source, path) && !slices.Contains(found, mount.Destination) {
				found = append(found, mount.Destination)
			}
		}
	})
	return found, err
}

func (c *client) inSandbox(ctx context.Context, sandboxID, podUID string, f func(*containersapi.Container, spec)) error {
	return c.each(ctx, fmt.Sprintf("labels.%q==%s", podLabel, podUID), func(container *containersapi.Container) {
		if container.GetLabels()[kindLabel] == kindSandbox || !abi.IsSandboxID(container.GetID()) {
			return
		}
		if s, ok := c.readSpec(container); ok && sandboxIDOf(container, s) == sandboxID {
			f(container, s)
		}
	})
}

// readSpec reads a container's spec, and reports whether that is possible. It logs only the
// size of a bad one: a spec holds the environment, which holds secrets.
func (c *client) readSpec(container *containersapi.Container) (spec, bool) {
	var s spec
	raw := container.GetSpec().GetValue()
	if len(raw) > maxSpec || json.Unmarshal(raw, &s) != nil {
		c.t.log.Warn("a container's spec cannot be read", zap.String("id", container.GetID()), zap.Int("bytes", len(raw)))
		return spec{}, false
	}
	return s, true
}

func (c *client) mounting(ctx context.Context, paths []string) ([]string, error) {
	users := make(map[string][]string) // the containers that mount a path, by sandbox
	filter := fmt.Sprintf("labels.%q!=%s", kindLabel, kindSandbox)
	err := c.each(ctx, filter, func(container *containersapi.Container) {
		// One that cannot be read is no reason to refuse a volume: who has the device is the kernel's word.
		if s, ok := c.readSpec(container); ok && slices.ContainsFunc(s.Mounts, func(m mount) bool { return isOneOf(paths, m.Source) }) {
			id := sandboxIDOf(container, s)
			users[id] = append(users[id], container.GetID())
		}
	})
	if err != nil {
		return nil, err
	}
	return c.liveOf(ctx, users)
}

// liveOf selects the sandboxes that live.
func (c *client) liveOf(ctx context.Context, users map[string][]string) (live []string, err error) {
	for id, containers := range users {
		lives, err := c.lives(ctx, id, containers)
		if err != nil {
			return nil, askError(ctx, c.t.party, id, err)
		}
		if lives {
			live = append(live, id)
		}
	}
	return live, nil
}

// lives reports whether a sandbox is known, or its own task or that of one of its containers
// runs. It can be one that kubelet did not make, or one without a container of its own.
func (c *client) lives(ctx context.Context, id string, containers []string) (bool, error) {
	if _, known := c.t.PodOf(id); known {
		return true, nil
	}
	for _, task := range append([]string{id}, containers...) {
		if runs, err := c.runs(ctx, task); runs || err != nil {
			return runs, err
		}
	}
	return false, nil
}

// sandboxIDOf returns the id of a container's sandbox. Outside of Kubernetes that is the
// container's own.
func sandboxIDOf(c *containersapi.Container, s spec) string {
	if id := c.GetSandbox(); id != "" {
		return id
	}
	if id := s.Annotations[sandboxAnnotation]; id != "" {
		return id
	}
	return c.GetID()
}

func isOneOf(sources []string, source string) bool {
	return slices.ContainsFunc(sources, func(one string) bool { return path.Clean(one) == path.Clean(source) })
}

// isSource reports whether a mount's host path is source, which is a resolved path.
// Kubelet's directory may be a symbolic link, and runtimes report the path as kubelet named
// it: containerd resolves only its last element. A path that cannot be kubelet's name for
// source is not resolved: it may be on a server that hangs.
func isSource(pod, hostPath, source string) bool {
	if hostPath == source {
		return true
	}
	ofPod := strings.LastIndex(hostPath, "/pods/"+pod+"/")
	if ofPod < 0 || !strings.HasSuffix(source, hostPath[ofPod:]) {
		return false
	}
	resolved, err := filepath.EvalSymlinks(hostPath)
	return err == nil && resolved == source
}

// sandboxOf reports whether a container is a sandbox that the CRI made, and reads it.
func (t *Tracker) sandboxOf(c *containersapi.Container) (sandbox, bool) {
	if c.GetLabels()[kindLabel] != kindSandbox {
		return sandbox{}, false
	}
	s := sandbox{id: c.GetID(), pod: c.GetLabels()[podLabel], created: c.GetCreatedAt().AsTime()}
	return s, t.good(s)
}
