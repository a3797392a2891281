package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// testbed is a daemon as a release has it, and what it is compared with, for one figure.
type testbed struct {
	t      rig.T
	ctx    context.Context
	set    settings
	sheet  *sheet
	daemon *rig.Daemon
}

func newTestbed(t rig.T, set settings, s *sheet) *testbed {
	r := &testbed{t: t, ctx: t.Context(), set: set, sheet: s, daemon: rig.NewDaemon(t)}
	r.daemon.Programs = filepath.Join(r.daemon.Dir, "bin")
	r.build("crust-proxy")
	return r
}

func (r *testbed) must(err error) { check.Must(r.t, err) }

func (r *testbed) build(programs ...string) { r.must(rig.BuildRelease(r.daemon.Programs, programs...)) }

func (r *testbed) run(name string, args ...string) time.Duration {
	start := time.Now()
	if out, err := exec.CommandContext(r.ctx, name, args...).CombinedOutput(); err != nil {
		r.must(fmt.Errorf("%s: %w: %s", name, err, out))
	}
	return time.Since(start)
}

// again prepares the bench in another role.
func (r *testbed) again(role string, args ...string) *rig.Process {
	self := check.Value(os.Executable())(r.t)
	return &rig.Process{Name: role, Program: self, Args: append([]string{role}, args...), LogFile: r.daemon.Dir + "/log/" + role}
}

// spawn starts the bench in another role and waits for a file or socket.
func (r *testbed) spawn(wait, role string, args ...string) {
	p := r.again(role, args...)
	p.Ready = func() error { return served(wait) }
	r.t.Cleanup(p.Kill)
	r.must(p.Start())
}

// served tells whether a file is there. A socket must be listened on too: its file is there before that.
func served(path string) error {
	info, err := os.Stat(path)
	if err != nil || info.Mode().Type() != os.ModeSocket {
		return err
	}
	conn, err := net.Dial("unix", path)
	if err != nil {
		return err
	}
	return conn.Close()
}

func (r *testbed) http(path string) string {
	return check.Value(r.daemon.HTTP(path))(r.t)
}

// image makes a disk image of a volume.
func (r *testbed) image(n int) string {
	path := filepath.Join(r.daemon.Images, strconv.Itoa(n))
	r.sparse(path)
	return path
}

func (r *testbed) sparse(path string) {
	r.must(os.WriteFile(path, nil, 0o600))
	r.must(os.Truncate(path, 1<<30))
}

// disk makes a loop device with a filesystem.
func (r *testbed) disk(n int) string {
	image := r.image(n)
	rig.Mkfs(r.t, "ext4", image)
	return rig.Loop(r.t, image, loopdev.Options{})
}

func podName(n int) string { return "pod-" + strconv.Itoa(n) }

// request asks for a volume of a pod.
func (r *testbed) request(n int, device string) *runtimev1.RuntimeStageVolumeRequest {
	return r.daemon.StageRequest(podName(n), device, "noatime")
}

// volume is a volume that can be staged, with a live emulated sandbox where it is bound.
type volume struct {
	request *runtimev1.RuntimeStageVolumeRequest
	stats   *runtimev1.RuntimeGetVolumeStatsRequest
	unstage *runtimev1.RuntimeUnstageVolumeRequest
	socket  string
}

func (r *testbed) volume(n int, device string) *volume {
	request := r.request(n, device)
	target := request.GetVolumeTargetPath()
	return &volume{
		request: request, stats: &runtimev1.RuntimeGetVolumeStatsRequest{VolumeTargetPath: target},
		unstage: &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: target},
		socket:  filepath.Join(r.daemon.GoSandboxes, sandboxID(n), "shim-monitor.sock"),
	}
}

// bound stages a volume and lets its sandbox take it, by the file that the Go runtime writes.
func (r *testbed) bound(client runtimev1.RuntimeClient, n int, device string) *volume {
	v := r.volume(n, device)
	r.must(check.Err(client.RuntimeStageVolume(r.ctx, v.request)))
	r.must(kata.WriteID(r.daemon.Kata, v.request.GetVolumeTargetPath(), sandboxID(n)))
	return v
}

// shims starts emulated shims. Their devices are named by number in a directory, or it is one.
func (r *testbed) shims(count int, devices string) {
	ready := r.daemon.Dir + "/shims-ready"
	r.spawn(ready, roleShims, r.daemon.GoSandboxes, fmt.Sprint(count), devices, ready)
}

// oneVolume starts the daemon and one shim over one disk.
func (r *testbed) oneVolume() *volume {
	r.daemon.Start()
	disk := r.disk(0)
	r.shims(1, disk)
	return r.bound(r.daemon.Runtime(), 0, disk)
}

// boundMany binds volumes over image files.
func (r *testbed) boundMany(count int) []*volume {
	r.shims(count, r.daemon.Images)
	volumes, client := make([]*volume, count), r.daemon.Runtime()
	for n := range volumes {
		volumes[n] = r.bound(client, n, r.image(n))
	}
	return volumes
}

// empty starts a server that answers at once, and gives a client of it.
func (r *testbed) empty() runtimev1.RuntimeClient {
	socket := r.daemon.Dir + "/empty.sock"
	r.spawn(socket, roleEmpty, socket)
	return runtimev1.NewRuntimeClient(r.daemon.Dial(socket))
}

// memory is the daemon's resident memory in bytes.
func (r *testbed) memory() float64 { return r.status(r.daemon.Pid(), "VmRSS:") }

// status is a size in the status of a process, in bytes.
func (r *testbed) status(pid int, key string) float64 {
	return r.fields(fmt.Sprintf("/proc/%d/status", pid))[key] * 1024
}

// fields reads lines of a name and a number.
func (r *testbed) fields(path string) map[string]float64 {
	raw, err := os.ReadFile(path)
	r.must(err)
	all := make(map[string]float64)
	for line := range strings.Lines(string(raw)) {
		var key string
		var value float64
		if _, err := fmt.Sscan(line, &key, &value); err == nil {
			all[key] = value
		}
	}
	return all
}

// size is that of the release build.
func size(r *testbed) {
	info := check.Value(os.Stat(r.daemon.Program("crust-proxy")))(r.t)
	r.sheet.mib("the daemon's binary", "< 35 MiB", float64(info.Size()), 35)
}
