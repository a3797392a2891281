// Package cri is a Kubernetes node without kubelet: a containerd of its own with the CRI plugin, real runc and shims,
// driven through CRI as kubelet does it. Its images are made here, so it needs no registry, and its pods use the node's
// network, so it needs no CNI plugin.
//
// It mounts a tmpfs over /run, because shims and runc keep their state there
// whatever they are told: its user must be in a mount namespace of its own.
package cri

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

const (
	// importTime bounds the import of an image.
	importTime = 2 * time.Minute
	// execTime ends a script in a container.
	execTime = 2 * time.Minute
)

// Programs gives a directory with the containerd that tools/containerd pins, its shim, runc, and
// CNI plugins in cni. It builds them where they are not there yet, which takes minutes.
var Programs = sync.OnceValues(func() (string, error) { return rig.Script("containerd.sh") })

// Options says what node is made.
type Options struct {
	// Handlers are runtime handlers beside runc: by name, the OCI runtime that the shim runs.
	Handlers map[string]string
	// Env is added to the environment of containerd, and so to that of shims and OCI runtimes.
	Env []string
	// Others tells which further processes, by their directory in /proc, belong to the
	// pods: those that neither containerd's directory nor a control group names.
	Others func(proc string) bool
}

// Node is a running containerd.
type Node struct {
	// Dir holds everything; Socket is containerd's.
	Dir, Socket string
	// CRI is the client that kubelet would be.
	CRI runtimeapi.RuntimeServiceClient

	// Process is containerd's. Shims and pods live on when it is stopped or killed.
	Process *rig.Process

	// Group is the parent control group of all pods.
	Group string

	// ShimsAreKilled is set by a test that kills shims: the mount of a container's root
	// filesystem was then left once, by containerd as far as is known.
	ShimsAreKilled bool

	programs string
	opts     Options
	conn     *grpc.ClientConn
	before   []string // mount points in /run, of others on this machine
}

// New makes a node, with its images, that is ready for pods. It goes with the test,
// which fails where pods that were removed have left anything.
func New(t rig.T, opts Options) *Node {
	t.Helper()
	dir := check.Value(os.MkdirTemp("/tmp", rig.Prefix("cn")))(t)
	programs := check.Value(Programs())(t)
	n := &Node{programs: programs, Dir: dir, Socket: dir + "/c.sock", opts: opts, Group: "/crust-test-" + filepath.Base(dir)}
	n.conn = rig.Dial(t, n.Socket) // it is closed after the node's end, which calls it
	n.CRI = runtimeapi.NewRuntimeServiceClient(n.conn)
	// The shim and runc are looked for in the PATH.
	n.Process = &rig.Process{
		Name: "containerd", Program: programs + "/containerd", Args: []string{"--config", dir + "/config.toml"},
		Env:     append([]string{"PATH=" + programs + ":" + os.Getenv("PATH")}, opts.Env...),
		LogFile: dir + "/log", Ready: n.ready,
	}
	t.Cleanup(func() {
		log := n.Process.Log()
		err := n.close()
		check.That(t, err == nil, "%v", err)
		if t.Failed() {
			t.Logf("log of containerd:\n%s", rig.Tail(log))
		}
	})
	n.before = rig.MountPoints("/run")
	// Overlayfs needs an upper filesystem that can be one: a tmpfs is.
	for _, point := range []string{dir, "/run"} {
		check.Must(t, unix.Mount("tmpfs", point, "tmpfs", 0, "mode=0755"))
	}
	check.Must(t, os.WriteFile(dir+"/config.toml", []byte(n.config()), 0o600))
	check.Must(t, n.Process.Start())
	check.Must(t, n.importImages())
	return n
}

// Attach takes the containerd that a machine has already, and gives it the images.
func Attach(t rig.T, socket string) *Node {
	t.Helper()
	n := &Node{Dir: t.TempDir(), Socket: socket, conn: rig.Dial(t, socket)}
	n.CRI = runtimeapi.NewRuntimeServiceClient(n.conn)
	check.Must(t, n.importImages())
	return n
}

func (n *Node) ready() error {
	status, err := n.CRI.Status(context.Background(), &runtimeapi.StatusRequest{})
	if err == nil && !isReady(status) {
		err = errors.New("the runtime is not ready")
	}
	return err
}

func isReady(status *runtimeapi.StatusResponse) bool {
	for _, condition := range status.GetStatus().GetConditions() {
		if condition.GetType() == runtimeapi.RuntimeReady {
			return condition.GetStatus()
		}
	}
	return false
}

// Version is containerd's.
func (n *Node) Version(ctx context.Context) (string, error) {
	reply, err := n.CRI.Version(ctx, &runtimeapi.VersionRequest{})
	return reply.GetRuntimeVersion(), err
}
