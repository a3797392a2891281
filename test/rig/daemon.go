package rig

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// Daemon is a crust-proxy of its own over directories of its own.
type Daemon struct {
	T       T
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
	// Programs is a directory with ours; empty means those that Program builds.
	Programs string
	// SocketOptions is YAML added to both sockets, such as `, mode: "0660"`.
	SocketOptions string
	// Extra is YAML added to the configuration.
	Extra string
	// Accepted is where the accepted configuration is kept; empty is nowhere.
	Accepted string
	// Point is where the tmpfs with Dir is mounted.
	Point   string
	process Process
}

// NewDaemon lays out the directories; Start starts it.
func NewDaemon(t T) *Daemon {
	t.Helper()
	// Unix socket paths are short, and so must Kata's targets be.
	point := check.Value(os.MkdirTemp("/tmp", Prefix("cp")))(t)
	check.Must(t, unix.Mount("tmpfs", point, "tmpfs", 0, "mode=0755"))
	// When a run was killed, the kernel names the files of its loop devices by their path in the
	// tmpfs alone: the mark has to be in that.
	dir := filepath.Join(point, mark())
	d := &Daemon{
		T: t, Point: point, Dir: dir, Kubelet: dir + "/kubelet", Images: dir + "/images", Kata: dir + "/kata/direct-volumes",
		GoSandboxes: dir + "/vc", RustSandboxes: dir + "/rs", SharedSandboxes: dir + "/shared",
		RuntimeSocket: dir + "/run/runtime.sock", AdminSocket: dir + "/run/admin.sock", HTTPSocket: dir + "/run/http.sock",
	}
	// Beside its configuration, each line of the log would be an event for the daemon.
	d.process = Process{Name: "the daemon", LogFile: dir + "/log/daemon"}
	d.process.Ready = func() error { _, err := d.HTTP("/readyz"); return err }
	for _, sub := range []string{d.Kubelet, d.Images, d.Kata, d.GoSandboxes, d.RustSandboxes, d.SharedSandboxes, dir + "/log"} {
		check.Must(t, os.MkdirAll(sub, 0o755))
	}
	t.Cleanup(d.close)
	return d
}

// close takes everything away, also what a test that failed has left.
func (d *Daemon) close() {
	d.Kill()
	if d.T.Failed() {
		d.T.Logf("log of the daemon:\n%s", Tail(d.Log()))
	}
	err := errors.Join(DetachLoops(d.Dir+"/"), Unmount(d.Point), os.Remove(d.Point))
	check.That(d.T, err == nil, "%v", err)
}

// UseUpInodes leaves no inode free on the tmpfs with Dir. Since Linux 6.6 extended attributes are taken from the same room.
func UseUpInodes(d *Daemon) {
	d.T.Helper()
	var fs unix.Statfs_t
	check.Must(d.T, unix.Statfs(d.Dir, &fs))
	check.Must(d.T, unix.Mount("", d.Point, "", unix.MS_REMOUNT, fmt.Sprintf("nr_inodes=%d", fs.Files-fs.Ffree)))
	for size := 512; size > 0; size /= 2 {
		_ = unix.Setxattr(d.Dir, fmt.Sprintf("user.%d", size), make([]byte, size), 0)
	}
	check.Is(d.T, os.Mkdir(filepath.Join(d.Dir, "one-more"), 0o700), unix.ENOSPC) // or there is an inode left
}

// Log is all that the daemon has logged.
func (d *Daemon) Log() string { return d.process.Log() }

// Config is the configuration as YAML.
func (d *Daemon) Config() string {
	return fmt.Sprintf(`
runDir: %[1]s/run
kubeletRoot: %[2]s
runtimeSocket: {path: %[3]s%[12]s}
adminSocket: {path: %[4]s%[12]s}
devices: {roots: [/dev, %[2]s/plugins], images: [%[5]s]}
handlers:
  kata: {enabled: true, directVolumes: %[6]s, goSandboxes: %[7]s, rustSandboxes: %[8]s, sharedSandboxes: %[9]s}
%[14]s
containerd: {socket: %[13]q}
http: {listen: "unix:%[10]s"}
%[11]s
`, d.Dir, d.Kubelet, d.RuntimeSocket, d.AdminSocket, d.Images, d.Kata, d.GoSandboxes, d.RustSandboxes,
		d.SharedSandboxes, d.HTTPSocket, d.Extra, d.SocketOptions, d.Containerd, indent(d.Handlers))
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
	d.must(os.WriteFile(path, []byte(d.Config()), 0o600))
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
	d.process.Program, d.process.Args = d.Program("crust-proxy"), []string{"--config", d.ConfigFile()}
	if d.Accepted != "" {
		d.process.Args = append(d.process.Args, "--accepted", d.Accepted)
	}
	d.must(d.process.Launch(env...))
}

// Program is the path of one of ours.
func (d *Daemon) Program(name string) string {
	d.T.Helper()
	if d.Programs != "" {
		return filepath.Join(d.Programs, name)
	}
	return Program(d.T, name)
}

func (d *Daemon) must(err error) {
	d.T.Helper()
	check.Must(d.T, err)
}

// Pid is the daemon's process.
func (d *Daemon) Pid() int { return d.process.Pid() }

// WaitReady waits for /readyz.
func (d *Daemon) WaitReady() {
	d.T.Helper()
	d.must(d.process.WaitReady())
}

// HTTP gets a page of the daemon.
func (d *Daemon) HTTP(path string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return Get(ctx, d.HTTPSocket, path)
}

// Kill kills the daemon with SIGKILL and waits for its end.
func (d *Daemon) Kill() { d.process.Kill() }

// Stop asks the daemon to end, and waits.
func (d *Daemon) Stop() {
	d.T.Helper()
	d.must(d.process.Stop())
}

// Dead tells whether the daemon has ended, by whatever.
func (d *Daemon) Dead() bool { return !d.process.Alive() }

// Starts counts how often it was started.
func (d *Daemon) Starts() int { return d.process.Starts() }

// Signal sends a signal.
func (d *Daemon) Signal(s os.Signal) {
	d.T.Helper()
	d.must(d.process.Signal(s))
}

// WaitEnd waits until the daemon has ended by itself and tells its exit code.
func (d *Daemon) WaitEnd(limit time.Duration) int {
	d.T.Helper()
	return check.Value(d.process.WaitEnd(limit))(d.T)
}

// Crustctl prepares the operator's tool.
func (d *Daemon) Crustctl(args ...string) *exec.Cmd {
	d.T.Helper()
	return exec.Command(d.Program("crustctl"), append([]string{"--socket", d.AdminSocket}, args...)...) //nolint:gosec // our own program
}

// Dial connects to a socket of the daemon for the time of the test.
func (d *Daemon) Dial(socket string) *grpc.ClientConn { d.T.Helper(); return Dial(d.T, socket) }

// Runtime is a client of the Runtime API.
func (d *Daemon) Runtime() runtimev1.RuntimeClient {
	return runtimev1.NewRuntimeClient(d.Dial(d.RuntimeSocket))
}

// Admin is a client of the Admin API.
func (d *Daemon) Admin() adminv1.AdminClient { return adminv1.NewAdminClient(d.Dial(d.AdminSocket)) }

// Target makes the directory that kubelet makes for a pod's volume, and gives the target in it.
func (d *Daemon) Target(pod string) string {
	d.T.Helper()
	dir := filepath.Join(d.Kubelet, "pods", pod, "volumes", "kubernetes.io~csi", "pv")
	d.must(os.MkdirAll(dir, 0o750))
	data := []byte(`{"driverName":"disk.example.com","volumeHandle":"v1"}`)
	d.must(os.WriteFile(filepath.Join(dir, "vol_data.json"), data, 0o600))
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
		d.Kata + "/*", d.Kata + "/.[^.]*",
	} {
		found := check.Value(filepath.Glob(pattern))(d.T)
		left = append(left, found...)
	}
	err := filepath.WalkDir(d.Dir+"/run/state/tmp", func(path string, entry os.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			left = append(left, path)
		}
		return nil
	})
	check.Require(d.T, err == nil || errors.Is(err, os.ErrNotExist), "%v", err)
	return append(left, MountPoints(d.Kubelet)...)
}

// WantClean fails the test where anything of a volume is left.
func (d *Daemon) WantClean() {
	d.T.Helper()
	notes, _ := filepath.Glob(d.Dir + "/run/state/kata/*") // of sandboxes
	left := append(d.Leftovers(), notes...)
	check.That(d.T, len(left) == 0, "left behind:\n  %s", strings.Join(left, "\n  "))
}
