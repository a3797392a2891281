package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// testbed is the daemon, and what it is compared with, over directories of their
// own on a tmpfs.
type testbed struct {
	dir, kubelet, images, kata, sandboxes string
	program                               string
	pprof, front                          bool
	// containerd is the socket of one, and crustRunc our runtime in it; empty is off.
	containerd, crustRunc string
	// more is YAML added to the configuration.
	more     string
	daemon   *exec.Cmd
	children []*exec.Cmd
	loops    []string
}

func newTestbed(pprof bool) (*testbed, error) {
	dir, err := rig.MountTmpfs("cpb", "k", "i", "d", "vc")
	if dir == "" {
		return nil, err
	}
	r := &testbed{dir: dir, kubelet: dir + "/k", images: dir + "/i", kata: dir + "/d", sandboxes: dir + "/vc", program: dir + "/crust-proxy", pprof: pprof}
	if err != nil {
		return r, err
	}
	return r, rig.BuildRelease(dir, "crust-proxy")
}

// close takes everything away again.
func (r *testbed) close() {
	r.stop()
	for _, child := range r.children {
		_ = child.Process.Kill()
		_ = child.Wait()
	}
	// The namespace's mounts, guards among them, go with one detached unmount.
	_ = unix.Unmount(r.dir, unix.MNT_DETACH)
	for _, loop := range r.loops {
		if err := loopdev.Detach(loop); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
		}
	}
	_ = os.Remove(r.dir)
}

func (r *testbed) config() string {
	return fmt.Sprintf(`
runDir: %[1]s/run
kubeletRoot: %[2]s
devices: {roots: [/dev], images: [%[3]s]}
handlers:
  kata: {directVolumes: %[4]s, goSandboxes: %[5]s, rustSandboxes: %[1]s/rs, sharedSandboxes: %[1]s/sh}
%[8]scontainerd: {socket: %[9]q}
http: {listen: "unix:%[1]s/http.sock", pprof: %[6]t}
front: {enabled: %[7]t}
%[10]s`, r.dir, r.kubelet, r.images, r.kata, r.sandboxes, r.pprof, r.front, r.crust(), r.containerd, r.more)
}

// crust has volumes handed to crust-runc, where that is there.
func (r *testbed) crust() string {
	if r.crustRunc == "" {
		return ""
	}
	return "  default: crust\n  crust: {enabled: true, programs: [" + r.crustRunc + "]}\n"
}

// readyLimit is far above the target, so that a slow start is a figure and not
// the end of the run.
const readyLimit = 10 * time.Minute

// start starts the daemon and tells how long it took to be ready.
func (r *testbed) start() (time.Duration, error) {
	// In a directory of its own: the daemon watches it, and the log beside it
	// would be one event a line.
	if err := os.MkdirAll(r.dir+"/etc", 0o700); err != nil {
		return 0, err
	}
	config := r.dir + "/etc/config.yaml"
	if err := os.WriteFile(config, []byte(r.config()), 0o600); err != nil {
		return 0, err
	}
	log, err := os.Create(r.dir + "/log")
	if err != nil {
		return 0, err
	}
	defer func() { _ = log.Close() }()
	r.daemon = exec.Command(r.program, "--config", config) //nolint:gosec // our own program
	r.daemon.Stdout, r.daemon.Stderr = log, log
	r.daemon.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	start := time.Now()
	if err := r.daemon.Start(); err != nil {
		return 0, err
	}
	for time.Since(start) < readyLimit {
		if body, err := r.get("/readyz"); err == nil && strings.HasPrefix(body, "ok") {
			return time.Since(start), nil
		}
		time.Sleep(time.Millisecond)
	}
	raw, _ := os.ReadFile(r.dir + "/log")
	return 0, fmt.Errorf("the daemon is not ready:\n%s", raw)
}

func (r *testbed) stop() {
	if r.daemon == nil {
		return
	}
	_ = r.daemon.Process.Signal(syscall.SIGTERM)
	_ = r.daemon.Wait()
	r.daemon = nil
}

// get fetches a page of the daemon.
func (r *testbed) get(path string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return rig.Get(ctx, r.dir+"/http.sock", path)
}

// spawn starts the bench in another role and waits for its socket.
func (r *testbed) spawn(wait string, args ...string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(self, args...) //nolint:gosec // ourselves
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	r.children = append(r.children, cmd)
	for start := time.Now(); time.Since(start) < 30*time.Second; time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(wait); err == nil {
			return nil
		}
	}
	return fmt.Errorf("%v: no %s after 30 s", args, wait)
}

func (r *testbed) dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

func (r *testbed) client() (runtimev1.RuntimeClient, func(), error) {
	conn, err := r.dial(r.dir + "/run/runtime.sock")
	if err != nil {
		return nil, nil, err
	}
	return runtimev1.NewRuntimeClient(conn), func() { _ = conn.Close() }, nil
}

// target makes the directory of a pod's volume.
func (r *testbed) target(n int) (string, error) {
	dir := filepath.Join(r.kubelet, "pods", "pod-"+strconv.Itoa(n), "volumes", "csi", "pv")
	return dir + "/mount", os.MkdirAll(dir, 0o700)
}

// image makes a disk image of a volume.
func (r *testbed) image(n int) (string, error) {
	path := filepath.Join(r.images, strconv.Itoa(n))
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return "", err
	}
	return path, os.Truncate(path, 1<<30)
}

// disk makes a loop device.
func (r *testbed) disk(n int) (string, error) {
	path, err := r.image(n)
	if err != nil {
		return "", err
	}
	loop, err := loopdev.Attach(path, loopdev.Options{})
	if err == nil {
		r.loops = append(r.loops, loop)
	}
	return loop, err
}

func (r *testbed) request(n int, device string) (*runtimev1.RuntimeStageVolumeRequest, error) {
	target, err := r.target(n)
	return &runtimev1.RuntimeStageVolumeRequest{
		VolumeType:       &runtimev1.VolumeType{Type: runtimev1.VolumeType_BLOCK},
		VolumeTargetPath: target, VolumeBackingPath: device, FsType: "ext4", MountFlags: []string{"noatime"},
	}, err
}

// memory is the daemon's resident memory in bytes.
func (r *testbed) memory() (int64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.daemon.Process.Pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.SplitSeq(string(raw), "\n") {
		if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseInt(strings.Fields(value)[0], 10, 64)
			return kib << 10, err
		}
	}
	return 0, errors.New("no VmRSS")
}

func (r *testbed) descriptors() (int, error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", r.daemon.Process.Pid))
	return len(entries), err
}
