//go:build system

// Package containerd tests the sandbox tracker against the real containerd and
// runc.
package containerd

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	namespacesapi "github.com/containerd/containerd/api/services/namespaces/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

func TestMain(m *testing.M) { os.Exit(rig.Main(m)) }

// daemon is a containerd of our own.
type daemon struct {
	t      *testing.T
	dir    string
	socket string
	rootfs string
	cmd    *exec.Cmd
	conn   *grpc.ClientConn
}

func newContainerd(t *testing.T) *daemon {
	t.Helper()
	rig.Need(t, "containerd", "containerd-shim-runc-v2", "runc")
	dir, err := os.MkdirTemp("/tmp", rig.Prefix("ctd"))
	check.Must(t, err)
	d := &daemon{t: t, dir: dir, socket: dir + "/c.sock", rootfs: dir + "/rootfs"}
	// Shims keep sockets and runc's state below /run whatever the configuration
	// says. This mount namespace is ours alone, so the machine's /run stays clean.
	check.Must(t, unix.Mount("tmpfs", "/run", "tmpfs", 0, "mode=0755"))
	t.Cleanup(func() { rig.UnmountAll(t, "/run") })
	t.Cleanup(d.remove)
	d.makeRootfs()
	config := "version = 2\nroot = \"" + dir + "/root\"\nstate = \"" + dir + "/state\"\n" +
		"disabled_plugins = [\"io.containerd.grpc.v1.cri\", \"io.containerd.cri.v1.runtime\", \"io.containerd.cri.v1.images\"]\n" +
		"[grpc]\n  address = \"" + d.socket + "\"\n"
	check.Must(t, os.WriteFile(dir+"/config.toml", []byte(config), 0o600))
	d.start()
	return d
}

// makeRootfs makes a root filesystem whose only program sleeps.
func (d *daemon) makeRootfs() {
	d.t.Helper()
	for _, sub := range []string{"proc", "dev", "sys"} {
		check.Must(d.t, os.MkdirAll(filepath.Join(d.rootfs, sub), 0o755))
	}
	source := filepath.Join(d.dir, "sleep.go")
	check.Must(d.t, os.WriteFile(source, []byte("package main\n\nimport \"time\"\n\nfunc main() { time.Sleep(time.Hour) }\n"), 0o600))
	build := exec.Command("go", "build", "-o", filepath.Join(d.rootfs, "sleep"), source)
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-mod=mod", "GO111MODULE=off")
	out, err := build.CombinedOutput()
	if err != nil {
		d.t.Fatalf("%v\n%s", err, out)
	}
}

func (d *daemon) start() {
	d.t.Helper()
	log, err := os.OpenFile(d.dir+"/log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	check.Must(d.t, err)
	defer func() { _ = log.Close() }()
	d.cmd = exec.Command("containerd", "--config", d.dir+"/config.toml")
	d.cmd.Stdout, d.cmd.Stderr = log, log
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	check.Must(d.t, d.cmd.Start())
	d.conn, err = grpc.NewClient("unix:"+d.socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithUnaryInterceptor(inTime))
	check.Must(d.t, err)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		_, err := namespacesapi.NewNamespacesClient(d.conn).List(d.ctx(), &namespacesapi.ListNamespacesRequest{})
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			raw, _ := os.ReadFile(d.dir + "/log")
			d.t.Fatalf("containerd does not serve: %v\n%s", err, raw)
		}
	}
}

// inTime ends every call, so that a containerd that hangs does not keep the test
// from cleaning up.
func inTime(
	ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, call grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	return call(ctx, method, req, reply, conn, opts...)
}

// kill kills containerd; shims and tasks live on.
func (d *daemon) kill() {
	_ = d.cmd.Process.Kill()
	_ = d.cmd.Wait()
	_ = d.conn.Close()
}

// remove ends and takes away everything, whatever the test left.
func (d *daemon) remove() {
	if d.cmd != nil {
		d.kill()
	}
	var left []int
	for range 100 {
		if left = d.processes(); len(left) == 0 {
			break
		}
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(20 * time.Millisecond)
	}
	if len(left) > 0 {
		d.t.Errorf("LEAKED: processes %v", left)
	}
	// Only a test that failed leaves control groups.
	for _, pattern := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
		groups, _ := filepath.Glob(pattern + d.cgroupPrefix() + "*")
		for _, group := range groups {
			_ = os.Remove(group)
		}
	}
	rig.UnmountAll(d.t, d.dir)
	if err := os.RemoveAll(d.dir); err != nil {
		d.t.Error(err)
	}
}

// processes lists our shims and tasks. A shim has our directory in its command
// line; a task has a control group of ours.
func (d *daemon) processes() []int {
	var out []int
	entries, _ := filepath.Glob("/proc/[0-9]*")
	for _, proc := range entries {
		pid, err := strconv.Atoi(filepath.Base(proc))
		if err != nil || pid <= 1 || pid == os.Getpid() {
			continue
		}
		// A zombie has no command line, and is its parent's affair.
		command, _ := os.ReadFile(proc + "/cmdline")
		groups, _ := os.ReadFile(proc + "/cgroup")
		if len(command) > 0 && (bytes.Contains(command, []byte(d.dir)) || bytes.Contains(groups, []byte(d.cgroupPrefix()))) {
			out = append(out, pid)
		}
	}
	return out
}

func (d *daemon) cgroupPrefix() string { return "crust-proxy-test-" + filepath.Base(d.dir) + "-" }

func (d *daemon) ctx() context.Context {
	return metadata.AppendToOutgoingContext(context.Background(), "containerd-namespace", "k8s.io")
}

// runSandbox makes what CRI makes for a pod: a labelled container with a task.
func (d *daemon) runSandbox(id, pod string) {
	d.t.Helper()
	spec, err := json.Marshal(map[string]any{
		"ociVersion": "1.0.2",
		"process":    map[string]any{"args": []string{"/sleep"}, "cwd": "/", "user": map[string]any{"uid": 0, "gid": 0}},
		"root":       map[string]any{"path": d.rootfs},
		"mounts":     []map[string]any{{"destination": "/proc", "type": "proc", "source": "proc"}},
		"linux":      map[string]any{"namespaces": []map[string]any{{"type": "pid"}, {"type": "mount"}}, "cgroupsPath": "/" + d.cgroupPrefix() + id},
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
		Rootfs:      []*types.Mount{{Type: "bind", Source: d.rootfs, Options: []string{"rbind", "rw"}}},
	})
	check.Must(d.t, err)
	_, err = tasks.Start(d.ctx(), &tasksapi.StartRequest{ContainerID: id})
	check.Must(d.t, err)
}

// addContainer makes the record of a container in a sandbox, as CRI of
// containerd 1.6 makes it. It is not run.
func (d *daemon) addContainer(id, sandboxID, pod, source, destination string) {
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

// shim is the process that looks after a task.
func (d *daemon) shim(id string) int {
	d.t.Helper()
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(d.pid(id)) + "/status")
	check.Must(d.t, err)
	_, after, _ := strings.Cut(string(raw), "\nPPid:")
	pid, err := strconv.Atoi(strings.TrimSpace(strings.SplitN(after, "\n", 2)[0]))
	check.Must(d.t, err)
	if !slices.Contains(d.processes(), pid) {
		d.t.Fatalf("process %d above the task is no shim of ours", pid)
	}
	return pid
}

// pid is the task's process.
func (d *daemon) pid(id string) int {
	d.t.Helper()
	reply, err := tasksapi.NewTasksClient(d.conn).Get(d.ctx(), &tasksapi.GetRequest{ContainerID: id})
	check.Must(d.t, err)
	return int(reply.GetProcess().GetPid())
}

// removeSandbox takes away what runSandbox made.
func (d *daemon) removeSandbox(id string) {
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
