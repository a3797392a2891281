//go:build system

package containerd

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

func TestMain(m *testing.M) { os.Exit(rig.Main(m)) }

// direct is a node whose sandboxes are made past CRI, by containerd's own API.
type direct struct {
	*cri.Node
	t    *testing.T
	conn *grpc.ClientConn
}

func newDirect(t *testing.T) *direct {
	t.Helper()
	d := &direct{Node: newNode(t, nil), t: t}
	d.conn = rig.Dial(t, d.Socket)
	// A root filesystem whose only program sleeps.
	for _, sub := range []string{"proc", "dev", "sys"} {
		check.Must(t, os.MkdirAll(filepath.Join(d.rootfs(), sub), 0o755))
	}
	busybox, err := exec.LookPath("busybox")
	check.Must(t, err)
	program, err := os.ReadFile(busybox)
	check.Must(t, err)
	check.Must(t, os.WriteFile(d.rootfs()+"/sleep", program, 0o755))
	return d
}

func (d *direct) rootfs() string { return d.Dir + "/rootfs" }

func (d *direct) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	d.t.Cleanup(cancel)
	return metadata.AppendToOutgoingContext(ctx, "containerd-namespace", "k8s.io")
}

// runSandbox makes what CRI makes for a pod: a labelled container with a task.
func (d *direct) runSandbox(id, pod string) {
	d.t.Helper()
	spec, err := json.Marshal(map[string]any{
		"ociVersion": "1.0.2",
		"process":    map[string]any{"args": []string{"/sleep", "2147483647"}, "cwd": "/", "user": map[string]any{"uid": 0, "gid": 0}},
		"root":       map[string]any{"path": d.rootfs()},
		"mounts":     []map[string]any{{"destination": "/proc", "type": "proc", "source": "proc"}},
		"linux":      map[string]any{"namespaces": []map[string]any{{"type": "pid"}, {"type": "mount"}}, "cgroupsPath": d.Group + "/" + id},
	})
	check.Must(d.t, err)
	_, err = containersapi.NewContainersClient(d.conn).Create(d.ctx(), &containersapi.CreateContainerRequest{
		Container: &containersapi.Container{
			ID:      id,
			Labels:  map[string]string{"io.cri-containerd.kind": "sandbox", "io.kubernetes.pod.uid": pod},
			Runtime: &containersapi.Container_Runtime{Name: "io.containerd.runc.v2"},
			Spec:    &anypb.Any{TypeUrl: "types.containerd.io/opencontainers/runtime-spec/1/Spec", Value: spec},
		},
	})
	check.Must(d.t, err)
	tasks := tasksapi.NewTasksClient(d.conn)
	_, err = tasks.Create(d.ctx(), &tasksapi.CreateTaskRequest{
		ContainerID: id,
		Rootfs:      []*types.Mount{{Type: "bind", Source: d.rootfs(), Options: []string{"rbind", "rw"}}},
	})
	check.Must(d.t, err)
	_, err = tasks.Start(d.ctx(), &tasksapi.StartRequest{ContainerID: id})
	check.Must(d.t, err)
}

// addContainer makes the record of a container in a sandbox, as one of before an
// upgrade from containerd 1.x. It is not run.
func (d *direct) addContainer(id, sandboxID, pod, source, destination string) {
	d.t.Helper()
	spec, err := json.Marshal(map[string]any{
		"ociVersion":  "1.0.2",
		"annotations": map[string]string{"io.kubernetes.cri.sandbox-id": sandboxID},
		"mounts":      []map[string]any{{"destination": destination, "type": "bind", "source": source}},
	})
	check.Must(d.t, err)
	_, err = containersapi.NewContainersClient(d.conn).Create(d.ctx(), &containersapi.CreateContainerRequest{
		Container: &containersapi.Container{
			ID:      id,
			Labels:  map[string]string{"io.cri-containerd.kind": "container", "io.kubernetes.pod.uid": pod},
			Runtime: &containersapi.Container_Runtime{Name: "io.containerd.runc.v2"},
			Spec:    &anypb.Any{TypeUrl: "types.containerd.io/opencontainers/runtime-spec/1/Spec", Value: spec},
		},
	})
	check.Must(d.t, err)
}

// pid is the task's process.
func (d *direct) pid(id string) int {
	d.t.Helper()
	reply, err := tasksapi.NewTasksClient(d.conn).Get(d.ctx(), &tasksapi.GetRequest{ContainerID: id})
	check.Must(d.t, err)
	return int(reply.GetProcess().GetPid())
}

// removeSandbox takes away what runSandbox made.
func (d *direct) removeSandbox(id string) {
	tasks := tasksapi.NewTasksClient(d.conn)
	_, _ = tasks.Kill(d.ctx(), &tasksapi.KillRequest{ContainerID: id, Signal: uint32(syscall.SIGKILL)})
	for range 100 {
		if _, err := tasks.Delete(d.ctx(), &tasksapi.DeleteTaskRequest{ContainerID: id}); err == nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	_, _ = containersapi.NewContainersClient(d.conn).Delete(d.ctx(), &containersapi.DeleteContainerRequest{ID: id})
}
