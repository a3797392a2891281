// Package cri is a Kubernetes node without kubelet: a containerd of its own
// with the CRI plugin, real runc and shims, driven through CRI as kubelet does
// it. Its images are made here, so it needs no registry, and its pods use the
// node's network, so it needs no CNI plugin.
//
// It mounts a tmpfs over /run, because shims and runc keep their state there
// whatever they are told: its user must be in a mount namespace of its own.
package cri

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	// startTime bounds the start of containerd.
	startTime = 30 * time.Second
	// callTime ends every call, so that a containerd that hangs does not keep its
	// user from cleaning up. Kubelet waits two minutes.
	callTime = 60 * time.Second
	// kubernetes is the namespace in which CRI keeps everything.
	kubernetes = "k8s.io"
)

// Options says what node is made.
type Options struct {
	// Programs is a directory with containerd and its shim; empty means those
	// that the machine has.
	Programs string
	// Handlers are runtime handlers beside runc: by name, the OCI runtime that the
	// shim runs.
	Handlers map[string]string
	// Env is added to the environment of containerd, and so to that of shims and
	// OCI runtimes.
	Env []string
}

// Node is a running containerd.
type Node struct {
	// Dir holds everything; Socket is containerd's.
	Dir, Socket string
	// CRI is the client that kubelet would be.
	CRI runtimeapi.RuntimeServiceClient

	opts  Options
	group string // parent control group of all pods
	conn  *grpc.ClientConn
	cmd   *exec.Cmd
	// wasKilled is set where containerd was killed once.
	wasKilled bool
}

// New makes a node, with its images, that is ready for pods. Close must be
// called, also after an error.
func New(opts Options) (*Node, error) {
	dir, err := os.MkdirTemp("/tmp", "cn")
	if err != nil {
		return nil, err
	}
	n := &Node{Dir: dir, Socket: dir + "/c.sock", opts: opts, group: "/crust-test-" + filepath.Base(dir)}
	// Overlayfs needs an upper filesystem that can be one: a tmpfs is.
	for _, point := range []string{dir, "/run"} {
		if err := unix.Mount("tmpfs", point, "tmpfs", 0, "mode=0755"); err != nil {
			return n, fmt.Errorf("mount a tmpfs on %s: %w", point, err)
		}
	}
	config, err := n.config()
	if err != nil {
		return n, err
	}
	if err := os.WriteFile(dir+"/config.toml", []byte(config), 0o600); err != nil {
		return n, err
	}
	if err := n.Launch(); err != nil {
		return n, err
	}
	return n, n.importImages()
}

// program is the path of one of containerd's programs.
func (n *Node) program(name string) string {
	if n.opts.Programs == "" {
		return name
	}
	return filepath.Join(n.opts.Programs, name)
}

// Launch starts containerd, at first or after Kill, and waits until CRI serves.
func (n *Node) Launch() error {
	log, err := os.OpenFile(n.Dir+"/log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	n.cmd = exec.Command(n.program("containerd"), "--config", n.Dir+"/config.toml")
	n.cmd.Stdout, n.cmd.Stderr = log, log
	// The shim is looked for in the PATH first.
	n.cmd.Env = append(os.Environ(), "PATH="+n.opts.Programs+":"+os.Getenv("PATH"))
	n.cmd.Env = append(n.cmd.Env, n.opts.Env...)
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := n.cmd.Start(); err != nil {
		n.cmd = nil
		return err
	}
	n.conn, err = grpc.NewClient("unix:"+n.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithUnaryInterceptor(inTime))
	if err != nil {
		return err
	}
	n.CRI = runtimeapi.NewRuntimeServiceClient(n.conn)
	return n.waitReady()
}

func (n *Node) waitReady() error {
	for deadline := time.Now().Add(startTime); ; time.Sleep(20 * time.Millisecond) {
		status, err := n.CRI.Status(context.Background(), &runtimeapi.StatusRequest{})
		if err == nil && isReady(status) {
			return nil
		}
		n.conn.ResetConnectBackoff()
		if time.Now().After(deadline) {
			return fmt.Errorf("containerd does not serve CRI: %w\n%s", errors.Join(err), n.Log())
		}
	}
}

func isReady(status *runtimeapi.StatusResponse) bool {
	for _, condition := range status.GetStatus().GetConditions() {
		if condition.GetType() == runtimeapi.RuntimeReady {
			return condition.GetStatus()
		}
	}
	return false
}

func inTime(
	ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, call grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	return call(ctx, method, req, reply, conn, opts...)
}

// Kill kills containerd with SIGKILL; shims and pods live on.
func (n *Node) Kill() {
	if n.cmd != nil {
		n.wasKilled = true
		_ = n.cmd.Process.Kill()
		_ = n.cmd.Wait()
		n.cmd = nil
	}
	if n.conn != nil {
		_ = n.conn.Close()
		n.conn = nil
	}
}

// Stop asks containerd to end; shims and pods live on.
func (n *Node) Stop() error {
	if n.cmd == nil {
		return nil
	}
	ended := make(chan struct{})
	if err := n.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	go func(cmd *exec.Cmd) { _, _ = cmd.Process.Wait(); close(ended) }(n.cmd)
	var slow error
	select {
	case <-ended:
	case <-time.After(startTime):
		slow = fmt.Errorf("containerd did not end within %v of SIGTERM", startTime)
	}
	n.Kill()
	return slow
}

// Log is the end of what containerd has logged.
func (n *Node) Log() string {
	const most = 8000
	raw, err := os.ReadFile(n.Dir + "/log")
	if err != nil {
		return err.Error()
	}
	return string(raw[max(0, len(raw)-most):])
}

// Version is containerd's.
func (n *Node) Version(ctx context.Context) (string, error) {
	reply, err := n.CRI.Version(ctx, &runtimeapi.VersionRequest{})
	return reply.GetRuntimeVersion(), err
}
