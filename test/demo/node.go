package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-proxy/crust-proxy/internal/loopdev"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// node is everything of the demo's node: directories on a tmpfs, the daemon, a
// disk.
type node struct {
	dir, bin, image, disk string
	daemon                *exec.Cmd
	conn                  *grpc.ClientConn
	sandboxes             []*sandbox
}

const diskSize = 128 << 20

func newNode() (*node, error) {
	dir, err := os.MkdirTemp("", "crust")
	if err != nil {
		return nil, err
	}
	n := &node{dir: dir, bin: "bin", image: filepath.Join(dir, filepath.Base(dir)+".img")}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755"); err != nil {
		return n, err
	}
	for _, sub := range []string{"kubelet", "kata", "vc", "etc"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o700); err != nil {
			return n, err
		}
	}
	if err := n.findPrograms(); err != nil {
		return n, err
	}
	return n, n.makeDisk()
}

// findPrograms takes what `make build` made, or builds it.
func (n *node) findPrograms() error {
	if _, err := os.Stat("bin/crustctl"); err == nil {
		return nil
	}
	n.bin = n.dir + "/bin"
	out, err := exec.Command("go", "build", "-o", n.bin+"/", "./cmd/...").CombinedOutput() //nolint:gosec // our own programs
	if err != nil {
		return fmt.Errorf("build: %w\n%s", err, out)
	}
	return nil
}

func (n *node) makeDisk() error {
	if err := os.WriteFile(n.image, nil, 0o600); err != nil {
		return err
	}
	if err := os.Truncate(n.image, diskSize); err != nil {
		return err
	}
	if out, err := exec.Command("mkfs.ext4", "-q", n.image).CombinedOutput(); err != nil { //nolint:gosec // our own file
		return fmt.Errorf("mkfs.ext4: %w\n%s", err, out)
	}
	var err error
	n.disk, err = loopdev.Attach(n.image, loopdev.Options{})
	return err
}

func (n *node) config() string {
	return fmt.Sprintf(`runDir: %[1]s/run
kubeletRoot: %[1]s/kubelet
handlers:
  kata: {directVolumes: %[1]s/kata, goSandboxes: %[1]s/vc, rustSandboxes: %[1]s/rs, sharedSandboxes: %[1]s/sh}
containerd: {socket: ""}
http: {listen: "unix:%[1]s/run/http.sock"}
`, n.dir)
}

// start starts the daemon and waits until it serves.
func (n *node) start(ctx context.Context) error {
	config := n.dir + "/etc/config.yaml"
	if err := os.WriteFile(config, []byte(n.config()), 0o600); err != nil {
		return err
	}
	log, err := os.OpenFile(n.dir+"/log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	n.daemon = exec.Command(n.bin+"/crust-proxy", "--config", config) //nolint:gosec // our own program
	n.daemon.Stdout, n.daemon.Stderr = log, log
	n.daemon.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := n.daemon.Start(); err != nil {
		return err
	}
	for range 1000 {
		if ctx.Err() != nil {
			return errInterrupted
		}
		if n.ready(ctx) {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	raw, _ := os.ReadFile(n.dir + "/log")
	return fmt.Errorf("the daemon does not serve:\n%s", raw)
}

func (n *node) ready(ctx context.Context) bool {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", n.dir+"/run/http.sock")
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://daemon/readyz", http.NoBody)
	if err != nil {
		return false
	}
	reply, err := (&http.Client{Transport: transport, Timeout: time.Second}).Do(req)
	if err != nil {
		return false
	}
	return errors.Join(reply.Body.Close()) == nil && reply.StatusCode == http.StatusOK
}

// kill kills the daemon with SIGKILL.
func (n *node) kill() {
	if n.daemon == nil {
		return
	}
	_ = n.daemon.Process.Kill()
	_ = n.daemon.Wait()
	n.daemon = nil
}

// client is connected anew, as a driver's would be after a restart.
func (n *node) client() (runtimev1.RuntimeClient, error) {
	if n.conn != nil {
		_ = n.conn.Close()
	}
	var err error
	n.conn, err = grpc.NewClient("unix:"+n.dir+"/run/runtime.sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	return runtimev1.NewRuntimeClient(n.conn), err
}

// crustctl runs the operator's tool.
func (n *node) crustctl(args ...string) string {
	cmd := exec.Command(n.bin+"/crustctl", append([]string{"--socket", n.dir + "/run/admin.sock"}, args...)...) //nolint:gosec // our own program
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Sprintf("%s%v", out, err)
	}
	return string(out)
}

// target makes what kubelet makes of a pod's volume.
func (n *node) target(pod string) (string, error) {
	dir := filepath.Join(n.dir, "kubelet", "pods", pod, "volumes", "kubernetes.io~csi", "data")
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return "", err
	}
	return dir + "/mount", os.WriteFile(dir+"/vol_data.json", []byte(`{"driverName":"disk.example.com"}`), 0o600)
}
