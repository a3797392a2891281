package cri

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Pod is a sandbox, and the configuration with which kubelet made it.
type Pod struct {
	// ID is the sandbox's, UID the pod's, Handler the runtime handler.
	ID, UID, Handler string

	node   *Node
	config *runtimeapi.PodSandboxConfig
}

// Mount is a host directory in a container.
type Mount struct {
	Host, Container string
	ReadOnly        bool
	// Recursive extends ReadOnly to what is mounted below.
	Recursive bool
	// Follows is the mount propagation HostToContainer.
	Follows bool
	// Unmapped leaves the files' owners as they are on the host, which kubelet never does
	// for a pod with users of its own.
	Unmapped bool
}

// Container is what kubelet wants of a container.
type Container struct {
	Name   string
	Mounts []Mount
	// Script is for the shell; empty means to sleep.
	Script string
	// User is who runs it; 0 is root.
	User int64
	// Groups are supplemental groups.
	Groups []int64
	// Memory is the limit, in bytes; 0 is none.
	Memory int64
	// TTY gives it a terminal.
	TTY bool
	// Attempt counts how often the container was made again in this sandbox.
	Attempt uint32
}

// Option changes the sandbox of a pod.
type Option func(*runtimeapi.PodSandboxConfig)

// Users gives a pod a user namespace, whose root is this user of the host.
func Users(root uint32) Option {
	ids := []*runtimeapi.IDMapping{{HostId: root, ContainerId: 0, Length: 65536}}
	return func(config *runtimeapi.PodSandboxConfig) {
		config.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &runtimeapi.UserNamespace{
			Mode: runtimeapi.NamespaceMode_POD, Uids: ids, Gids: ids,
		}
	}
}

// RunPod runs a sandbox. A sandbox that takes the place of another one of the same pod is a further attempt.
func (n *Node) RunPod(ctx context.Context, uid, handler string, attempt uint32, options ...Option) (*Pod, error) {
	config := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: "pod-" + uid, Uid: uid, Namespace: "default", Attempt: attempt},
		LogDirectory: filepath.Join(n.Dir, "pod-logs", uid),
		// Labels and annotations are kubelet's.
		Labels: map[string]string{
			"io.kubernetes.pod.name": "pod-" + uid, "io.kubernetes.pod.namespace": "default", "io.kubernetes.pod.uid": uid,
		},
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent: n.Group + "/pod" + uid,
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{
					Network: runtimeapi.NamespaceMode_NODE, Pid: runtimeapi.NamespaceMode_CONTAINER, Ipc: runtimeapi.NamespaceMode_POD,
				},
			},
		},
	}
	for _, option := range options {
		option(config)
	}
	reply, err := n.CRI.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
	if err != nil {
		return nil, err
	}
	return &Pod{ID: reply.GetPodSandboxId(), UID: uid, Handler: handler, node: n, config: config}, nil
}

// Run creates and starts a container and gives its id.
func (p *Pod) Run(ctx context.Context, c Container) (string, error) {
	id, err := p.Create(ctx, c)
	if err != nil {
		return "", err
	}
	_, err = p.node.CRI.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: id})
	return id, err
}

// Create creates a container and gives its id.
func (p *Pod) Create(ctx context.Context, c Container) (string, error) {
	if c.Script == "" {
		c.Script = "exec sleep 2147483647"
	}
	// Names are reserved for the pod, not for the sandbox.
	c.Attempt += p.config.GetMetadata().GetAttempt()
	config := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: c.Name, Attempt: c.Attempt},
		Image:    &runtimeapi.ImageSpec{Image: BusyboxImage},
		Command:  []string{"/bin/sh", "-c", c.Script},
		LogPath:  fmt.Sprintf("%s_%d.log", c.Name, c.Attempt),
		Tty:      c.TTY,
		Labels: map[string]string{
			"io.kubernetes.container.name": c.Name, "io.kubernetes.pod.name": "pod-" + p.UID,
			"io.kubernetes.pod.namespace": "default", "io.kubernetes.pod.uid": p.UID,
		},
		Linux: &runtimeapi.LinuxContainerConfig{Resources: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: c.Memory}, SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
			NamespaceOptions:   p.config.GetLinux().GetSecurityContext().GetNamespaceOptions(),
			RunAsUser:          &runtimeapi.Int64Value{Value: c.User},
			SupplementalGroups: c.Groups,
		}},
	}
	for _, m := range c.Mounts {
		config.Mounts = append(config.Mounts, p.mount(m))
	}
	reply, err := p.node.CRI.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{
		PodSandboxId: p.ID, Config: config, SandboxConfig: p.config,
	})
	return reply.GetContainerId(), err
}

func (p *Pod) mount(m Mount) *runtimeapi.Mount {
	mount := &runtimeapi.Mount{HostPath: m.Host, ContainerPath: m.Container, Readonly: m.ReadOnly, RecursiveReadOnly: m.Recursive}
	if m.Follows {
		mount.Propagation = runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER
	}
	if users := p.config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetUsernsOptions(); !m.Unmapped {
		mount.UidMappings, mount.GidMappings = users.GetUids(), users.GetGids()
	}
	return mount
}

// ExitError says that a script failed in a container.
type ExitError struct {
	Code   int32
	Output string
}

func (e *ExitError) Error() string { return fmt.Sprintf("exit code %d: %s", e.Code, e.Output) }

// Exec runs a shell script in a container and gives what it wrote.
func (n *Node) Exec(ctx context.Context, container, script string) (string, error) {
	reply, err := n.CRI.ExecSync(ctx, &runtimeapi.ExecSyncRequest{
		ContainerId: container, Cmd: []string{"/bin/sh", "-c", script}, Timeout: int64(execTime.Seconds()),
	})
	if err != nil {
		return "", err
	}
	if code := reply.GetExitCode(); code != 0 {
		return string(reply.GetStdout()), &ExitError{Code: code, Output: string(reply.GetStdout()) + string(reply.GetStderr())}
	}
	return string(reply.GetStdout()), nil
}

// Stop stops the sandbox and its containers.
func (p *Pod) Stop(ctx context.Context) error {
	_, err := p.node.CRI.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: p.ID})
	return err
}

// Remove stops and removes the sandbox and its containers, and then the pod's control group, as kubelet does.
func (p *Pod) Remove(ctx context.Context) error {
	stopped := p.Stop(ctx)
	if status.Code(stopped) == codes.NotFound {
		stopped = nil // an earlier attempt has removed it, and still said that it could not stop it
	}
	_, removed := p.node.CRI.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: p.ID})
	_ = rig.TryRemoveGroup(p.node.Group + "/pod" + p.UID) // the pod's next sandbox may be in it
	return errors.Join(stopped, removed)
}
