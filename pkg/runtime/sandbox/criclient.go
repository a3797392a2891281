package sandbox

import (
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

type criClient struct {
	t   *Tracker
	api runtimeapi.RuntimeServiceClient
}

// broadcasts reports whether the runtime sends each event to all listeners. CRI-O before 1.28
// sends it to one of them: to listen would take events away from kubelet.
func (c *criClient) broadcasts(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, criListTime)
	defer cancel()
	reply, err := c.api.Version(ctx, &runtimeapi.VersionRequest{})
	if err != nil {
		return false, fmt.Errorf("ask for the version: %w", err)
	}
	switch version := reply.GetRuntimeVersion(); reply.GetRuntimeName() {
	case "containerd":
		return true, checkSupported(version)
	case "cri-o":
		return slices.Compare(majorMinor(version), []int{1, 28}) >= 0, nil
	}
	return false, nil
}

func (c *criClient) live(ctx context.Context) (map[string]sandbox, error) {
	ready, err := c.ready(ctx)
	if err != nil {
		return nil, err
	}
	live := make(map[string]sandbox, len(ready))
	for _, item := range ready {
		s := sandbox{id: item.GetId(), pod: item.GetMetadata().GetUid(), created: time.Unix(0, item.GetCreatedAt())}
		if c.t.good(s) {
			live[s.id] = s
		}
	}
	return live, nil
}

// ready lists the sandboxes that are ready, also those that kubelet did not make.
func (c *criClient) ready(ctx context.Context) ([]*runtimeapi.PodSandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, criListTime)
	defer cancel()
	reply, err := c.api.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{
		State: &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_READY},
	}})
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	// A runtime that ignores the filter lists ended ones as well.
	return slices.DeleteFunc(reply.GetItems(), func(p *runtimeapi.PodSandbox) bool {
		return p.GetState() != runtimeapi.PodSandboxState_SANDBOX_READY
	}), nil
}

func (c *criClient) listed(ctx context.Context) (map[string]bool, error) {
	ready, err := c.ready(ctx)
	ids := make(map[string]bool, len(ready))
	for _, item := range ready {
		ids[item.GetId()] = true
	}
	return ids, err
}

func (c *criClient) containerIDs(ctx context.Context, sandboxID, _ string) ([]string, error) {
	all, err := c.list(ctx, &runtimeapi.ContainerFilter{PodSandboxId: sandboxID})
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, container := range all {
		if container.GetPodSandboxId() == sandboxID && abi.IsSandboxID(container.GetId()) {
			ids = append(ids, container.GetId())
		}
	}
	return ids, nil
}

// list lists containers; a nil filter selects all.
func (c *criClient) list(ctx context.Context, filter *runtimeapi.ContainerFilter) ([]*runtimeapi.Container, error) {
	reply, err := c.api.ListContainers(ctx, &runtimeapi.ListContainersRequest{Filter: filter})
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	return reply.GetContainers(), nil
}

// mounts lists a container's mounts. A container that is gone has none.
func (c *criClient) mounts(ctx context.Context, id string) ([]*runtimeapi.Mount, error) {
	reply, err := c.api.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id})
	if status.Code(err) == codes.NotFound {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ask for container %s: %w", id, err)
	}
	return reply.GetStatus().GetMounts(), nil
}

func (c *criClient) destinations(ctx context.Context, sandboxID, podUID, path string) ([]string, error) {
	ids, err := c.containerIDs(ctx, sandboxID, podUID)
	if err != nil {
		return nil, err
	}
	var found []string
	for _, id := range ids {
		mounts, err := c.mounts(ctx, id)
		if err != nil {
			return nil, err
		}
		for _, mount := range mounts {
			if isSource(podUID, mount.GetHostPath(), path) && !slices.Contains(found, mount.GetContainerPath()) {
				found = append(found, mount.GetContainerPath())
			}
		}
	}
	return found, nil
}

// mounting asks which sandboxes are ready and does not use those in memory: without events,
// a new one gets there seconds later.
func (c *criClient) mounting(ctx context.Context, paths []string) ([]string, error) {
	all, err := c.list(ctx, nil)
	if err != nil {
		return nil, err
	}
	live, err := c.listed(ctx)
	if err != nil {
		return nil, err
	}
	var users []string
	for _, container := range all {
		id := container.GetPodSandboxId()
		if !live[id] || slices.Contains(users, id) {
			continue
		}
		mounts, err := c.mounts(ctx, container.GetId())
		if err != nil {
			return nil, askError(ctx, c.t.party, id, err)
		}
		if slices.ContainsFunc(mounts, func(m *runtimeapi.Mount) bool { return isOneOf(paths, m.GetHostPath()) }) {
			users = append(users, id)
		}
	}
	return users, nil
}
