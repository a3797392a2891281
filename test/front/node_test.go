//go:build system

// Package front tests the CSI front with real parts: the daemon, the reference
// CSI driver, loop devices, filesystems, and an emulation of kubelet's calls and
// of Kata's sandboxes; with kills of each party at each step.
package front

import (
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/kataemu"
	"github.com/crust-proxy/crust-proxy/internal/loopdev"
	"github.com/crust-proxy/crust-proxy/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

const (
	mib        = 1 << 20
	driverName = "driver.crust-proxy.dev"
	deferAll   = "policy: {rules: [{name: all, defer: true}]}"
	deferNone  = "policy: {rules: []}"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantCode(t testing.TB, err error, want codes.Code, words ...string) {
	t.Helper()
	if got := status.Code(err); got != want {
		t.Fatalf("got %v (%v); want %v", got, err, want)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("the error does not say %q: %v", word, err)
		}
	}
}

func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if is() {
			return
		}
	}
	t.Fatal("never: " + what)
}

// node is a node with crust-proxy in front of the reference driver.
type node struct {
	t testing.TB
	*harness.Daemon
	driver     *process
	driverArgs []string
	conn       *grpc.ClientConn
	csi        csi.NodeClient
	controller csi.ControllerClient
	pods       int             // that wrote to the volume
	foreign    map[string]bool // targets that somebody else has mounted something on
}

// newNode starts both. Policy is the policy's YAML, args are added to the
// driver's.
func newNode(t testing.TB, policy string, args ...string) *node {
	t.Helper()
	harness.Need(t, "mkfs.ext4", "blkid")
	n := &node{t: t, Daemon: harness.NewDaemon(t), foreign: make(map[string]bool)}
	n.Extra = "front: {enabled: true}\n" + policy
	for _, dir := range []string{n.data(), n.registry(), n.Kubelet + "/plugins_registry", n.Kubelet + "/plugins/" + driverName} {
		must(t, os.MkdirAll(dir, 0o755))
	}
	n.driverArgs = append([]string{
		"--endpoint", "unix://" + n.driverSocket(), "--data-dir", n.data(), "--node-id", "node-1", "--capacity", "100000000000",
		"--kubelet-registration-socket", n.registry() + "/" + driverName + "-reg.sock", "--kubelet-endpoint", n.driverSocket(),
	}, args...)
	n.startDriver()
	t.Cleanup(func() {
		n.driver.kill()
		for _, loop := range n.loops() { // a failed test leaves some
			_ = unix.Unmount(loop, unix.MNT_DETACH)
			_ = loopdev.Detach(loop)
		}
	})
	n.Start()
	n.conn = dial(t, n.csiSocket())
	n.csi, n.controller = csi.NewNodeClient(n.conn), csi.NewControllerClient(n.conn)
	n.waitServed()
	return n
}

func (n *node) data() string         { return n.Dir + "/data" }
func (n *node) registry() string     { return n.Kubelet + "/crust-proxy/registry" }
func (n *node) driverSocket() string { return n.Kubelet + "/plugins/" + driverName + "/csi.sock" }
func (n *node) csiSocket() string    { return n.Dir + "/run/csi/" + driverName + ".sock" }

// dial finds a daemon that was restarted at once: kubelet dials for each call.
func dial(t testing.TB, socket string) *grpc.ClientConn {
	t.Helper()
	quick := backoff.Config{BaseDelay: 2 * time.Millisecond, Multiplier: 1, MaxDelay: 2 * time.Millisecond}
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: quick, MinConnectTimeout: time.Second}))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// waitServed waits until the driver answers through the front.
func (n *node) waitServed() {
	n.t.Helper()
	eventually(n.t, "the driver answers through the front", func() bool {
		if n.driver.dead() || n.Dead() {
			n.t.Fatal("the driver or the daemon has ended")
		}
		return n.served()
	})
}

func (n *node) served() bool {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, err := n.csi.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	return err == nil
}

func (n *node) startDriver(env ...string) {
	n.t.Helper()
	n.driver = startProcess(n.t, env, harness.Program(n.t, "crust-driver"), n.driverArgs...)
}

// arm restarts the daemon so that it is killed at a step, which may be one that
// it takes as it starts.
func (n *node) arm(step string) {
	n.t.Helper()
	n.Kill()
	n.Launch("CRUST_FAILPOINTS=" + step + "=kill")
	eventually(n.t, "the daemon serves or is killed", func() bool {
		return n.served() || n.Dead()
	})
}

// process is a program of the test.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
}

func startProcess(t testing.TB, env []string, program string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(program, args...), done: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), env...)
	log, err := os.OpenFile(filepath.Join(t.TempDir(), "driver.log"), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	must(t, err)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must(t, p.cmd.Start())
	go func() { _ = p.cmd.Wait(); close(p.done) }()
	t.Cleanup(func() {
		if t.Failed() {
			raw, _ := os.ReadFile(log.Name())
			t.Logf("log of the driver:\n%s", raw[max(0, len(raw)-4000):])
		}
		_ = log.Close()
	})
	return p
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

func (p *process) dead() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// wantClean asserts that nothing of any volume is left but the driver's data.
func (n *node) wantClean() {
	n.t.Helper()
	n.WantClean()
	var left []string
	for _, dir := range []string{n.Dir + "/run/state/csi", n.Kubelet + "/plugins/kubernetes.io/csi/crust-proxy.dev", n.Kubelet + "/pods"} {
		_ = filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
			if err == nil && (!entry.IsDir() || strings.Count(filepath.Base(path), "") > 40) {
				left = append(left, path)
			}
			return nil
		})
	}
	for _, line := range n.mounts() {
		if !strings.HasPrefix(line, n.Dir+" ") {
			left = append(left, "mount "+line)
		}
	}
	left = append(left, n.loops()...)
	if len(left) > 0 {
		n.t.Errorf("left behind:\n  %s", strings.Join(left, "\n  "))
	}
}

// mounts lists "point filesystem source" of what is mounted below the node.
func (n *node) mounts() []string {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	must(n.t, err)
	var out []string
	for line := range strings.SplitSeq(string(raw), "\n") {
		before, after, _ := strings.Cut(line, " - ")
		fields, fs := strings.Fields(before), strings.Fields(after)
		if len(fields) > 4 && len(fs) > 1 && strings.HasPrefix(fields[4], n.Dir) {
			out = append(out, fields[4]+" "+fs[0]+" "+fs[1])
		}
	}
	return out
}

// loops lists the loop devices over the driver's images.
func (n *node) loops() []string {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	var out []string
	for _, file := range files {
		raw, _ := os.ReadFile(file)
		if strings.HasPrefix(string(raw), n.data()) {
			out = append(out, "/dev/"+filepath.Base(filepath.Dir(filepath.Dir(file))))
		}
	}
	return out
}

// sandbox is a guest that has mounted a volume's device, and its shim.
type sandbox struct {
	n    *node
	id   string
	dir  string // where the guest's filesystem can be seen
	loop string
	shim *kataemu.Shim
	info string // its mark beside mountInfo.json
}

// boot starts a sandbox for what the pod's target says, as Kata's Go runtime does.
func (n *node) boot(id string, v *volume, pod string) *sandbox {
	n.t.Helper()
	device, fsType := n.mountInfo(v, pod)
	flags := uintptr(0)
	if v.readOnly {
		flags = unix.MS_RDONLY
	}
	s := &sandbox{n: n, id: id, dir: n.t.TempDir()}
	var err error
	s.loop, err = loopdev.Attach(device, loopdev.Options{ReadOnly: v.readOnly})
	must(n.t, err)
	n.t.Cleanup(func() { s.end() })
	must(n.t, unix.Mount(s.loop, s.dir, fsType, flags, ""))
	s.shim, err = kataemu.Start(kataemu.Options{
		Flavor: kataemu.Go, SandboxID: id, Sandboxes: n.GoSandboxes,
		Mounts: map[string]kataemu.Statfs{device: kataemu.MountedAt(s.dir)},
	})
	must(n.t, err)
	s.info = filepath.Join(n.kataDir(v, pod), id)
	must(n.t, os.WriteFile(s.info, nil, 0o600))
	return s
}

// end is the end of the sandbox: its guest unmounts, its shim goes.
func (s *sandbox) end() {
	if s.loop == "" {
		return
	}
	_ = unix.Unmount(s.dir, 0)
	if err := loopdev.Detach(s.loop); err != nil {
		s.n.t.Error(err)
	}
	if s.shim != nil {
		_ = s.shim.Stop()
	}
	s.loop = ""
}

func (n *node) kataDir(v *volume, pod string) string {
	return filepath.Join(n.Kata, base64.URLEncoding.EncodeToString([]byte(v.target(n, pod))))
}

// mountInfo reads what Kata would.
func (n *node) mountInfo(v *volume, pod string) (device, fsType string) {
	n.t.Helper()
	return n.readMountInfo(n.kataDir(v, pod))
}

func (n *node) readMountInfo(dir string) (device, fsType string) {
	n.t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, "mountInfo.json"))
	must(n.t, err)
	for _, key := range []struct {
		name string
		into *string
	}{{"device", &device}, {"fstype", &fsType}} {
		_, rest, _ := strings.Cut(string(raw), fmt.Sprintf("%q:", key.name))
		_, rest, _ = strings.Cut(rest, `"`)
		*key.into, _, _ = strings.Cut(rest, `"`)
	}
	return device, fsType
}
