package cri

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Pid is the pause process, which keeps the sandbox alive.
func (p *Pod) Pid(ctx context.Context) (int, error) {
	reply, err := p.node.CRI.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.ID, Verbose: true})
	if err != nil {
		return 0, err
	}
	return pidIn(reply.GetInfo())
}

// Pid is the first process of a container.
func (n *Node) Pid(ctx context.Context, container string) (int, error) {
	reply, err := n.CRI.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: container, Verbose: true})
	if err != nil {
		return 0, err
	}
	return pidIn(reply.GetInfo())
}

// pidIn reads what containerd tells on a verbose question.
func pidIn(info map[string]string) (int, error) {
	var told struct {
		Pid int `json:"pid"`
	}
	if err := json.Unmarshal([]byte(info["info"]), &told); err != nil {
		return 0, err
	}
	if told.Pid <= 1 {
		return 0, fmt.Errorf("containerd tells the process %d: it does not run", told.Pid)
	}
	return told.Pid, nil
}

// Shim is the process that looks after a sandbox and its containers.
func (p *Pod) Shim(ctx context.Context) (int, error) {
	pid, err := p.Pid(ctx)
	if err != nil {
		return 0, err
	}
	return rig.Parent(pid)
}

// InPod tells whether a process belongs to one of the node's pods, and not to the node itself.
func (n *Node) InPod(pid int) bool {
	groups, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	return bytes.Contains(groups, []byte(n.Group+"/"))
}

// State is the sandbox's, as CRI tells it.
func (p *Pod) State(ctx context.Context) (runtimeapi.PodSandboxState, error) {
	reply, err := p.node.CRI.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.ID})
	return reply.GetStatus().GetState(), err
}

// Enter moves containerd, and so all that it starts from now on, into a control group.
func (n *Node) Enter(group string) error {
	return os.WriteFile(group+"/cgroup.procs", []byte(strconv.Itoa(n.Process.Pid())), 0o600)
}
