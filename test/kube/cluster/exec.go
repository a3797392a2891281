//go:build system

package cluster

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// Exec runs a shell script in the container main and gives what it wrote. It does
// not go by kubelet or the API server, so that they may be away.
func (p *Pod) Exec(script string) string {
	p.k.T.Helper()
	out, err := p.TryExec("main", script)
	if err != nil {
		p.k.T.Fatalf("pod %s: %s: %v", p.Name, script, err)
	}
	return out
}

// TryExec runs a shell script in one of the containers. A script that fails is a
// *cri.ExitError.
func (p *Pod) TryExec(container, script string) (string, error) {
	ctx, cancel := p.k.context()
	defer cancel()
	id, err := p.containerID(ctx, container)
	if err != nil {
		return "", err
	}
	return p.k.Containerd.node.Exec(ctx, id, script)
}

// containerID is that of the running container.
func (p *Pod) containerID(ctx context.Context, name string) (string, error) {
	reply, err := p.k.Containerd.node.CRI.ListContainers(ctx, &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{
		State:         &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING},
		LabelSelector: map[string]string{"io.kubernetes.pod.uid": string(p.UID), "io.kubernetes.container.name": name},
	}})
	if err != nil {
		return "", err
	}
	if len(reply.GetContainers()) != 1 {
		return "", fmt.Errorf("pod %s has %d running containers %s", p.Name, len(reply.GetContainers()), name)
	}
	return reply.GetContainers()[0].GetId(), nil
}

// Sandbox is the id of the pod's sandbox that is ready.
func (p *Pod) Sandbox() (string, error) {
	ctx, cancel := p.k.context()
	defer cancel()
	reply, err := p.k.Containerd.node.CRI.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{
		State:         &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_READY},
		LabelSelector: map[string]string{"io.kubernetes.pod.uid": string(p.UID)},
	}})
	if err != nil {
		return "", err
	}
	if len(reply.GetItems()) != 1 {
		return "", fmt.Errorf("pod %s has %d sandboxes that are ready", p.Name, len(reply.GetItems()))
	}
	return reply.GetItems()[0].GetId(), nil
}

// Pid is the first process of a running container, as the node sees it.
func (p *Pod) Pid(container string) (int, error) {
	ctx, cancel := p.k.context()
	defer cancel()
	id, err := p.containerID(ctx, container)
	if err != nil {
		return 0, err
	}
	return p.k.Containerd.node.Pid(ctx, id)
}

// Target is where kubelet has a volume published.
func (p *Pod) Target(v *Volume) string {
	return filepath.Join(KubeletRoot, "pods", string(p.UID), "volumes/kubernetes.io~csi", v.Name, "mount")
}

// Node is the node as containerd has it, for what is not here.
func (c *Containerd) Node() *cri.Node { return c.node }

// Usage is what a filesystem has, in bytes and inodes.
type Usage struct {
	Total, Used, Available                   int64
	TotalInodes, UsedInodes, AvailableInodes int64
}

// DF is the usage that the pod's own df tells for a mount.
func (p *Pod) DF(path string) Usage {
	p.k.T.Helper()
	size, inodes := p.df("-k", path), p.df("-i", path)
	return Usage{
		Total: size[0] << 10, Used: size[1] << 10, Available: size[2] << 10,
		TotalInodes: inodes[0], UsedInodes: inodes[1], AvailableInodes: inodes[2],
	}
}

// df reads the three numbers of one line.
func (p *Pod) df(flag, path string) [3]int64 {
	p.k.T.Helper()
	out := p.Exec("df -P " + flag + " " + path + " | tail -n 1")
	fields := strings.Fields(out)
	if len(fields) < 4 {
		p.k.T.Fatalf("df tells %q", out)
	}
	var numbers [3]int64
	for i := range numbers {
		number, err := strconv.ParseInt(fields[i+1], 10, 64)
		if err != nil {
			p.k.T.Fatalf("df tells %q: %v", out, err)
		}
		numbers[i] = number
	}
	return numbers
}
