package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// node is everything of the demo's node: directories on a tmpfs, the CSI driver,
// the daemon in front of it.
type node struct {
	dir, bin       string
	disk, image    string // of the volume, once it is published
	driver, daemon *exec.Cmd
	conn           *grpc.ClientConn
	sandboxes      []*sandbox
}

const (
	diskSize   = 128 << 20
	driverName = "driver.crust-proxy.dev"
)

func newNode() (*node, error) {
	dir, err := rig.MountTmpfs("crust", "kubelet/plugins/"+driverName, "kubelet/plugins_registry",
		"kubelet/crust-proxy/registry", "kata", "vc", "etc", "data")
	if dir == "" {
		return nil, err
	}
	n := &node{dir: dir, bin: "bin"}
	if err != nil {
		return n, err
	}
	return n, n.findPrograms()
}

// findPrograms takes what `make build` made, or builds it.
func (n *node) findPrograms() error {
	if _, err := os.Stat("bin/crust-driver"); err == nil {
		return nil
	}
	n.bin = n.dir + "/bin"
	return rig.Build(n.bin, nil, "...")
}

// startDriver starts the CSI driver. Its registrar, which is usually a container
// beside it, looks for crust-proxy where it would look for kubelet.
func (n *node) startDriver() (err error) {
	socket := n.dir + "/kubelet/plugins/" + driverName + "/csi.sock"
	n.driver, err = n.run("crust-driver", "--endpoint", "unix://"+socket, "--data-dir", n.dir+"/data", "--node-id", "demo",
		"--kubelet-registration-socket", n.dir+"/kubelet/crust-proxy/registry/"+driverName+"-reg.sock", "--kubelet-endpoint", socket)
	return err
}

// run starts one of our programs, with its output in the log.
func (n *node) run(program string, args ...string) (*exec.Cmd, error) {
	log, err := os.OpenFile(n.dir+"/log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(n.bin+"/"+program, args...) //nolint:gosec // our own program
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	return cmd, cmd.Start()
}

func (n *node) config() string {
	return fmt.Sprintf(`runDir: %[1]s/run
kubeletRoot: %[1]s/kubelet
handlers:
  kata: {directVolumes: %[1]s/kata, goSandboxes: %[1]s/vc, rustSandboxes: %[1]s/rs, sharedSandboxes: %[1]s/sh}
containerd: {socket: ""}
front: {enabled: true}
policy:
  rules:
    - {name: pods-in-sandboxes, drivers: [%[2]s], defer: true}
http: {listen: "unix:%[1]s/run/http.sock"}
`, n.dir, driverName)
}

// start starts the daemon and waits until it serves.
func (n *node) start(ctx context.Context) error {
	config := n.dir + "/etc/config.yaml"
	if err := os.WriteFile(config, []byte(n.config()), 0o600); err != nil {
		return err
	}
	var err error
	if n.daemon, err = n.run("crust-proxy", "--config", config); err != nil {
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
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_, err := rig.Get(ctx, n.dir+"/run/http.sock", "/readyz")
	return err == nil && n.driverServed(ctx)
}

// driverServed tells whether the driver answers through crust-proxy.
func (n *node) driverServed(ctx context.Context) bool {
	if err := n.connect(); err != nil {
		return false
	}
	_, err := csi.NewIdentityClient(n.conn).Probe(ctx, &csi.ProbeRequest{})
	return err == nil
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

// connect dials anew, as kubelet does for each call.
func (n *node) connect() (err error) {
	if n.conn != nil {
		_ = n.conn.Close()
	}
	n.conn, err = grpc.NewClient("unix:"+n.dir+"/run/csi/"+driverName+".sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	return err
}

func (n *node) csi() csi.NodeClient { return csi.NewNodeClient(n.conn) }

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
	return dir + "/mount", os.WriteFile(dir+"/vol_data.json", []byte(`{"driverName":"`+driverName+`"}`), 0o600)
}
