//go:build system

package node

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

const size = 320 << 20

// life is a volume in the machine, and the pod that has it.
type life struct {
	t             *testing.T
	d             *rig.Daemon // the installed one
	node          *cri.Node
	fs            string
	image, device string
	target        string
	pod           *cri.Pod
	main          string // container
}

// prepare has the installed parts at hand.
func prepare(t *testing.T, fs string) *life {
	return &life{t: t, fs: fs, node: cri.Attach(t, "/run/containerd/containerd.sock"), d: &rig.Daemon{
		T: t, Kubelet: "/var/lib/kubelet", RuntimeSocket: "/run/crust-proxy/runtime.sock", AdminSocket: "/run/crust-proxy/admin.sock",
	}}
}

// podOn runs in the machine: the life of a volume with a filesystem of the test's name.
func podOn(t *testing.T) {
	l := prepare(t, t.Name())
	l.image = rig.Image(t, size)
	rig.Mkfs(t, l.fs, l.image)
	l.device = rig.Loop(t, l.image, loopdev.Options{})
	l.start(0)
	t.Run("in its group", l.of(life.groups))
	t.Run("grown", l.of(life.grown))
	t.Run("frozen", l.of(life.frozen))
	t.Run("out of memory", l.of(life.outOfMemory))
	t.Run("without the agent", l.of(life.alone))
	l.end()
}

// of is a part of the life as a subtest.
func (l *life) of(part func(life)) func(*testing.T) {
	return func(t *testing.T) { one := *l; one.t = t; part(one) }
}

func (l life) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	l.t.Cleanup(cancel)
	return ctx
}

// start starts a pod in a slice, as kubelet does with systemd's control groups.
func (l *life) start(attempt uint32) {
	uid := "00000000-0000-4000-8000-" + fmt.Sprintf("%012x", len(l.fs))
	request := l.d.StageRequest(uid, l.device)
	request.FsType, l.target = l.fs, request.GetVolumeTargetPath()
	check.Succeeds(l.t, "stage", func() error { // udev may look at the new device for longer than a moment, as kubelet would see
		_, err := l.d.Runtime().RuntimeStageVolume(l.ctx(), request)
		return err
	})
	l.pod = check.Value(l.node.RunPod(l.ctx(), uid, "crust", attempt, func(config *runtimeapi.PodSandboxConfig) {
		config.Linux.CgroupParent = "/kubepods.slice/kubepods-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice"
	}))(l.t)
	l.main = l.run(cri.Container{Name: "main", Script: "i=0; while :; do i=$((i+1)); echo $i >/data/count; echo $i >/tmp/count; sleep 0.1; done"})
	l.wantStats()
	check.Empty(l.t, rig.MountsOf(l.device), "the node has the volume mounted")
}

func (l life) wantStats() {
	l.t.Helper()
	check.Succeeds(l.t, "statistics", func() error {
		reply, err := l.d.Runtime().RuntimeGetVolumeStats(l.ctx(), &runtimev1.RuntimeGetVolumeStatsRequest{VolumeTargetPath: l.target})
		if err == nil && len(reply.GetUsage()) == 0 {
			err = fmt.Errorf("they are %v", reply)
		}
		return err
	})
}

func (l life) run(c cri.Container) string {
	l.t.Helper()
	c.Mounts = []cri.Mount{{Host: l.target, Container: "/data"}}
	return check.Value(l.pod.Run(l.ctx(), c))(l.t)
}

func (l life) exec(script string) string {
	l.t.Helper()
	return strings.TrimSpace(check.Value(l.node.Exec(l.ctx(), l.main, script))(l.t))
}

// groups: the pod is in its slice, and what serves all pods in no pod's and in no service's group.
func (l life) groups() {
	group := groupOf(l.t, check.Value(l.node.Pid(l.ctx(), l.main))(l.t))
	check.That(l.t, strings.HasPrefix(group, "0::/kubepods.slice/kubepods-pod") && strings.Contains(group, ".slice/cri-containerd-"), "the container is in %s", group)
	l.wantAside("-agent", "")
}

// ours lists the processes of crust-runc, or its agent, that have a word among their arguments.
func ours(program, word string) []int {
	return rig.Processes(func(proc string) bool {
		command, _ := os.ReadFile(proc + "/cmdline") //nolint:gosec // a file of the kernel's
		exe, _ := os.Readlink(proc + "/exe")
		return strings.HasPrefix(exe, "/usr/bin/crust-runc"+program) && strings.Contains(string(command), "\x00"+word)
	})
}

// wantAside wants such processes to be there, and in a group of their own.
func (l life) wantAside(program, word string) {
	l.t.Helper()
	pids := ours(program, word)
	check.That(l.t, len(pids) > 0, "there is no crust-runc%s %s", program, word)
	for _, pid := range pids {
		check.Equal(l.t, groupOf(l.t, pid), "0::/crust-runc", "%s is in", rig.DescribeProcess(pid))
	}
}

func groupOf(t *testing.T, pid int) string {
	t.Helper()
	raw := check.Value(os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cgroup")))(t)
	return strings.TrimSpace(string(raw))
}

// grown: ext4 grows online only with CAP_SYS_RESOURCE, which a machine that runs tests may lack.
func (l life) grown() {
	check.That(l.t, rig.MayGrow(l.t, l.fs), "the machine lacks CAP_SYS_RESOURCE")
	l.grow(2 * size)
}

// alone: the daemon runs crust-runc itself, within what systemd lets the unit and its drop-in do.
func (l life) alone() {
	check.Must(l.t, rig.KillAll(func() []int { return ours("-agent", "") }))
	l.wantStats()
	l.grow(3 * size)
	l.frozen()
	check.That(l.t, len(ours("-agent", "")) == 0, "an agent runs")
}

func (l life) grow(to int64) {
	l.t.Helper()
	rig.Enlarge(l.t, l.image, l.device, to)
	check.Retried(l.t, "grow", func() error {
		reply, err := l.d.Runtime().RuntimeExpandVolume(l.ctx(), &runtimev1.RuntimeExpandVolumeRequest{
			VolumeTargetPath: l.target, CapacityRange: &runtimev1.CapacityRange{RequiredBytes: to},
		})
		check.That(l.t, err != nil || reply.GetCapacityBytes() == to, "it has %d bytes", reply.GetCapacityBytes())
		return err
	})
	blocks, err := strconv.ParseInt(l.exec("df -k /data | tail -1 | awk '{print $2}'"), 10, 64)
	check.That(l.t, err == nil && blocks > (to-size/2)/1024, "the container sees %d KiB, %v", blocks, err)
}

func (l life) frozen() {
	admin := l.d.Admin()
	check.Must(l.t, check.Err(admin.FreezeVolume(l.ctx(), &adminv1.FreezeVolumeRequest{Volume: l.target, Timeout: durationpb.New(5 * time.Minute)})))
	l.wantAside("", "watch-frozen\x00")
	check.Succeeds(l.t, "nothing is written", func() error { _, err := l.node.Exec(l.ctx(), l.main, still); return err })
	check.Must(l.t, check.Err(admin.ThawVolume(l.ctx(), &adminv1.ThawVolumeRequest{Volume: l.target})))
	l.wantWrites()
}

const still = "a=$(cat /tmp/count); sleep 1; test $a = $(cat /tmp/count)"

// wantWrites waits until the pod has written more to its volume.
func (l life) wantWrites() {
	l.t.Helper()
	check.Succeeds(l.t, "the pod writes", func() error { _, err := l.node.Exec(l.ctx(), l.main, "! { "+still+"; }"); return err })
}

// outOfMemory: the kernel kills one container, and neither the others nor what serves the volume.
func (l life) outOfMemory() {
	id := l.run(cri.Container{Name: "greedy", Memory: 24 << 20, Script: "echo greedy >/data/greedy; exec dd if=/dev/zero of=/dev/null bs=99M count=9"})
	check.Succeeds(l.t, "the kernel kills it", func() error {
		reply, err := l.node.CRI.ContainerStatus(l.ctx(), &runtimeapi.ContainerStatusRequest{ContainerId: id})
		// systemd may remove the control group before containerd has read from it why.
		if status := reply.GetStatus(); err == nil && (status.GetState() != runtimeapi.ContainerState_CONTAINER_EXITED || status.GetExitCode() != 137) {
			err = fmt.Errorf("it is %v, %d %q", status.GetState(), status.GetExitCode(), status.GetReason())
		}
		return err
	})
	check.Equal(l.t, l.exec("cat /data/greedy"), "greedy", "the other container reads")
	l.wantStats()
	l.wantAside("-agent", "")
}

// end removes the pod and the volume: nothing is left, and the filesystem is clean.
func (l *life) end() {
	unstage := func() error {
		_, err := l.d.Runtime().RuntimeUnstageVolume(l.ctx(), &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: l.target})
		return err
	}
	check.Code(l.t, unstage(), codes.Aborted, "has not ended")
	check.Must(l.t, l.pod.Remove(l.ctx()))
	check.Retried(l.t, "unstage", unstage)
	check.Succeeds(l.t, "the device is free", func() error { return rig.Exclusive(l.device) })
	rig.Fsck(l.t, l.fs, l.device)
	check.Empty(l.t, check.Left(2*time.Minute, 100*time.Millisecond, func() []string { return rig.MountPoints("/run/crust") }), "it left")
}
