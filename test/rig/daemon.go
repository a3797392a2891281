//go:build system

package rig

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// built holds the programs that this test binary made.
var built struct {
	sync.Mutex
	dir string
	err error
}

// Program builds one of our programs, with failpoints, and gives its path. It
// is built once for each test binary.
func Program(t testing.TB, name string) string {
	t.Helper()
	built.Lock()
	defer built.Unlock()
	if built.dir == "" {
		built.dir, built.err = os.MkdirTemp("", "crust-test-bin-")
		if built.err != nil {
			t.Fatal(built.err)
		}
	}
	path := filepath.Join(built.dir, name)
	if _, err := os.Stat(path); err == nil {
		return path
	}
	if err := Build(built.dir, []string{"-tags", "failpoints"}, name); err != nil {
		t.Fatal(err)
	}
	return path
}

// removeBuilt removes the programs when the tests have ended.
func removeBuilt() {
	built.Lock()
	defer built.Unlock()
	if built.dir != "" {
		_ = os.RemoveAll(built.dir)
	}
}

// Daemon is a crust-proxy of its own over directories of its own.
type Daemon struct {
	T       testing.TB
	Dir     string // everything lies below
	Kubelet string
	Images  string
	Kata    string // Kata's direct-volumes
	GoSandboxes,
	RustSandboxes,
	SharedSandboxes string
	RuntimeSocket, AdminSocket, HTTPSocket string
	// Containerd is the socket of a containerd; empty is none.
	Containerd string
	// Handlers is YAML added to the handlers, such as `default: crust`.
	Handlers string
	// KataOff has the daemon run without Kata's handler.
	KataOff bool
	// SocketOptions is YAML added to both sockets, such as `, mode: "0660"`.
	SocketOptions string
	// Extra is YAML added to the configuration.
	Extra string
	// Env is added to the environment.
	Env []string
	// Command builds the process; nil means the plain program.
	Command func(program string, args ...string) *exec.Cmd

	cmd    *exec.Cmd
	done   chan struct{}
	log    lockedBuffer
	starts int
}

type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// NewDaemon lays out the directories; Start starts it.
func NewDaemon(t testing.TB) *Daemon {
	t.Helper()
	// Unix socket paths are short, and so must Kata's targets be.
	dir, err := os.MkdirTemp("/tmp", Prefix("cp"))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755"); err != nil {
		t.Fatal(err)
	}
	d := &Daemon{
		T: t, Dir: dir, Kubelet: dir + "/kubelet", Images: dir + "/images", Kata: dir + "/kata/direct-volumes",
		GoSandboxes: dir + "/vc", RustSandboxes: dir + "/rs", SharedSandboxes: dir + "/shared",
		RuntimeSocket: dir + "/run/runtime.sock", AdminSocket: dir + "/run/admin.sock", HTTPSocket: dir + "/run/http.sock",
	}
	for _, sub := range []string{d.Kubelet, d.Images, d.Kata, d.GoSandboxes, d.RustSandboxes, d.SharedSandboxes} {
		if err := os.MkdirAll(sub, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		d.Kill()
		UnmountAll(t, dir)
		_ = os.Remove(dir)
		if t.Failed() {
			t.Logf("log of the daemon:\n%s", tail(d.log.String(), 8000))
		}
	})
	return d
}

func tail(s string, most int) string {
	if len(s) > most {
		return "..." + s[len(s)-most:]
	}
	return s
}

// Log is all that the daemon has logged.
func (d *Daemon) Log() string { return d.log.String() }

// Config is the configuration as YAML.
func (d *Daemon) Config() string {
	return fmt.Sprintf(`
runDir: %[1]s/run
kubeletRoot: %[2]s
runtimeSocket: {path: %[3]s%[12]s}
adminSocket: {path: %[4]s%[12]s}
devices: {roots: [/dev, %[2]s/plugins], images: [%[5]s]}
handlers:
  kata: {enabled: %[15]t, directVolumes: %[6]s, goSandboxes: %[7]s, rustSandboxes: %[8]s, sharedSandboxes: %[9]s}
%[14]s
containerd: {socket: %[13]q}
http: {listen: "unix:%[10]s"}
%[11]s
`, d.Dir, d.Kubelet, d.RuntimeSocket, d.AdminSocket, d.Images, d.Kata, d.GoSandboxes, d.RustSandboxes,
		d.SharedSandboxes, d.HTTPSocket, d.Extra, d.SocketOptions, d.Containerd, indent(d.Handlers), !d.KataOff)
}

// indent makes YAML a part of a key at the top.
func indent(text string) string {
	if text == "" {
		return ""
	}
	return "  " + strings.ReplaceAll(text, "\n", "\n  ")
}

// ConfigFile writes the configuration and gives its path.
func (d *Daemon) ConfigFile() string {
	path := d.Dir + "/config.yaml"
	if err := os.WriteFile(path, []byte(d.Config()), 0o600); err != nil {
		d.T.Fatal(err)
	}
	return path
}

// Start starts the daemon and waits until it is ready.
func (d *Daemon) Start(env ...string) {
	d.T.Helper()
	d.Launch(env...)
	d.WaitReady()
}

// Launch starts the daemon and waits for nothing.
func (d *Daemon) Launch(env ...string) {
	d.T.Helper()
	build := d.Command
	if build == nil {
		build = exec.Command
	}
	cmd := build(Program(d.T, "crust-proxy"), "--config", d.ConfigFile())
	cmd.Env = append(append(append(os.Environ(), cmd.Env...), d.Env...), env...)
	cmd.Stdout, cmd.Stderr = &d.log, &d.log
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	if err := cmd.Start(); err != nil {
		d.T.Fatal(err)
	}
	d.cmd, d.done = cmd, make(chan struct{})
	d.starts++
	go func(done chan struct{}) { _ = cmd.Wait(); close(done) }(d.done)
}

// Pid is the daemon's process.
func (d *Daemon) Pid() int { return d.cmd.Process.Pid }

// WaitReady waits for /readyz.
func (d *Daemon) WaitReady() {
	d.T.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for time.Now().Before(deadline) {
		select {
		case <-d.done:
			d.T.Fatalf("the daemon ended:\n%s", tail(d.log.String(), 4000))
		default:
		}
		if body, err := d.HTTP("/readyz"); err == nil && body != "" {
			return
		}
		time.Sleep(2 * time.Millisecond)
	}
	d.T.Fatalf("the daemon is not ready:\n%s", tail(d.log.String(), 4000))
}

// HTTP gets a page of the daemon.
func (d *Daemon) HTTP(path string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return Get(ctx, d.HTTPSocket, path)
}

// Kill kills the daemon with SIGKILL and waits for its end.
func (d *Daemon) Kill() {
	if d.cmd == nil {
		return
	}
	_ = d.cmd.Process.Kill()
	<-d.done
	d.cmd = nil
}

// Dead tells whether the daemon has ended, by whatever.
func (d *Daemon) Dead() bool {
	if d.cmd == nil {
		return true
	}
	select {
	case <-d.done:
		return true
	default:
		return false
	}
}

// Starts counts how often it was started.
func (d *Daemon) Starts() int { return d.starts }

// Signal sends a signal.
func (d *Daemon) Signal(s os.Signal) {
	d.T.Helper()
	if err := d.cmd.Process.Signal(s); err != nil {
		d.T.Fatal(err)
	}
}

// WaitEnd waits until the daemon has ended by itself and tells its exit code.
func (d *Daemon) WaitEnd(limit time.Duration) int {
	d.T.Helper()
	select {
	case <-d.done:
		code := d.cmd.ProcessState.ExitCode()
		d.cmd = nil
		return code
	case <-time.After(limit):
		d.T.Fatalf("the daemon did not end in %v", limit)
		return -1
	}
}

// Dial connects to a socket of the daemon for the time of the test.
func (d *Daemon) Dial(socket string) *grpc.ClientConn {
	d.T.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		d.T.Fatal(err)
	}
	d.T.Cleanup(func() { _ = conn.Close() })
	return conn
}

// Runtime is a client of the Runtime API.
func (d *Daemon) Runtime() runtimev1.RuntimeClient {
	return runtimev1.NewRuntimeClient(d.Dial(d.RuntimeSocket))
}

// Admin is a client of the Admin API.
func (d *Daemon) Admin() adminv1.AdminClient { return adminv1.NewAdminClient(d.Dial(d.AdminSocket)) }

// Target makes the directory that kubelet makes for a pod's volume, and gives
// the target in it.
func (d *Daemon) Target(pod string) string {
	d.T.Helper()
	dir := filepath.Join(d.Kubelet, "pods", pod, "volumes", "kubernetes.io~csi", "pv")
	if err := os.MkdirAll(dir, 0o750); err != nil {
		d.T.Fatal(err)
	}
	data := []byte(`{"driverName":"disk.example.com","volumeHandle":"v1"}`)
	if err := os.WriteFile(filepath.Join(dir, "vol_data.json"), data, 0o600); err != nil {
		d.T.Fatal(err)
	}
	return filepath.Join(dir, "mount")
}

// StageRequest is an ordinary request.
func (d *Daemon) StageRequest(pod, device string, flags ...string) *runtimev1.RuntimeStageVolumeRequest {
	return &runtimev1.RuntimeStageVolumeRequest{
		VolumeType:        &runtimev1.VolumeType{Type: runtimev1.VolumeType_BLOCK},
		VolumeTargetPath:  d.Target(pod),
		VolumeBackingPath: device, FsType: "ext4", MountFlags: flags,
	}
}

// Leftovers lists what is left of volumes: records, guards, projections.
func (d *Daemon) Leftovers() []string {
	var left []string
	for _, pattern := range []string{
		d.Dir + "/run/state/volumes/*", d.Dir + "/run/state/removing/*", d.Dir + "/run/state/bad/*",
		d.Kata + "/*", d.Kata + "/.[!.]*",
	} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			d.T.Fatal(err)
		}
		left = append(left, found...)
	}
	err := filepath.WalkDir(d.Dir+"/run/state/tmp", func(path string, entry os.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			left = append(left, path)
		}
		return nil
	})
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		d.T.Fatal(err)
	}
	return append(left, MountPoints(d.Kubelet)...)
}

// WantClean fails the test where anything of a volume is left.
func (d *Daemon) WantClean() {
	d.T.Helper()
	if left := d.Leftovers(); len(left) > 0 {
		d.T.Errorf("left behind:\n  %s", strings.Join(left, "\n  "))
	}
}
