package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
	"github.com/crust-proxy/crust-proxy/test/rig/vmnode"
)

// podTelling is a showing with pods of containerd.
type podTelling struct {
	teller
	n              *vmnode.Node
	pod            *cri.Pod
	container, sum string
}

// inVMs reports whether the pods run in virtual machines, and not by crust-runc.
func (p *podTelling) inVMs() bool { return p.n.Runtime != nil }

// storyOfPods is the whole way of one volume into two pods of crust-runc.
func storyOfPods(t rig.T) {
	p := &podTelling{teller: teller{t: t}}
	p.castOfPods("crust-runc, with runc: the pod's containers run on the host's kernel")
	p.n = vmnode.NewRunc(t, built())
	p.tell(p.publish, p.runUnaware, p.startPod, p.measure, p.grow, p.refuseSecondOwner, p.killDaemon, p.endPod, p.readAgain, p.verify)
}

// storyOfVMs is the whole way of one volume into the guests of two machines.
func storyOfVMs(t rig.T) {
	p := &podTelling{teller: teller{t: t}}
	p.castOfPods("crust-vm: a QEMU machine for each pod, with a kernel of its own; without KVM its processor is emulated")
	p.n = vmnode.New(t, built())
	p.tell(p.publish, p.startPod, p.measure, p.grow, p.refuseSecondOwner, p.killMachine, p.readAgain, p.verify)
}

func (p *podTelling) castOfPods(runtime string) {
	p.cast(
		part{isReal, "crust-proxy, built from this source"},
		part{isReal, "the CSI driver: crust-driver, which here knows nothing of deferral and attaches loop devices"},
		part{isReal, "containerd, with its shim and its CRI"},
		part{isReal, runtime},
		part{isReal, "the kernel: devices, ext4, mounts, and what it refuses"},
		part{emulated, "kubelet: the calls that it makes to the CSI driver and to containerd"},
	)
}

func (p *podTelling) publish(context.Context) {
	p.begin("A CSI driver that knows nothing of deferral makes a volume for a pod.")
	p.v = p.n.Driver.Create(p.t, "data", "ext4", diskSize)
	p.v.Publish()
	var err error
	p.disk, err = p.n.Device(p.v)
	p.must(err)
	p.must(p.n.Watch(p.disk))
	p.check(true, "CreateVolume, NodeStageVolume, NodePublishVolume: OK; the device is %s", p.disk)
	err = os.WriteFile(p.v.Target+"/data", []byte("data"), 0o600)
	p.check(errors.Is(err, unix.ENOSPC), "the target holds the guard; a write there gives: %v", err)
}

// runUnaware runs a pod by a runtime that does not know of deferral.
func (p *podTelling) runUnaware(ctx context.Context) {
	p.begin("By mistake, plain runc starts a pod with the volume.")
	pod, err := p.n.CRI.RunPod(ctx, "pod-of-runc", "runc", 0)
	p.must(err)
	container, err := pod.Run(ctx, cri.Container{Name: "app", Mounts: []cri.Mount{{Host: p.v.Target, Container: "/data"}}})
	p.must(err)
	_, err = p.n.CRI.Exec(ctx, container, "echo data >/data/file")
	p.check(err != nil && strings.Contains(err.Error(), "No space left"), "it has the guard, and not the node's disk; a write there gives: %v", err)
	p.must(pod.Remove(ctx))
}

// unseen checks that the volume was never mounted where the host sees it. The host's kernel has no
// filesystem of a virtual machine at all.
func (p *podTelling) unseen() {
	never := p.n.Mounts.CheckNone()
	if !p.inVMs() {
		p.check(never == nil && len(rig.MountsOf(p.disk)) == 0, "the host never had it mounted: not in mountinfo, at any time")
		return
	}
	_, err := os.Stat("/sys/fs/ext4/" + filepath.Base(p.disk))
	p.check(os.IsNotExist(err) && never == nil, "the host's kernel never had the filesystem: not in mountinfo, at any time, nor in /sys/fs/ext4")
}

// exec runs a script in the pod's container.
func (p *podTelling) exec(ctx context.Context, script string) string {
	p.t.Helper()
	out, err := p.n.CRI.Exec(ctx, p.container, script)
	p.must(err)
	return strings.TrimSpace(out)
}

// size is the filesystem's, as the container sees it.
func (p *podTelling) size(ctx context.Context) int64 {
	var blocks, size int64
	_, err := fmt.Sscan(p.exec(ctx, "stat -f -c '%b %S' /data"), &blocks, &size)
	p.must(err)
	return blocks * size
}

// start runs the pod and its container, and tells how long it took.
func (p *podTelling) start(ctx context.Context) {
	began := time.Now()
	var err error
	p.pod, err = p.n.CRI.RunPod(ctx, p.v.Pod, vmnode.Handler, 0)
	p.must(err)
	booted := time.Since(began)
	p.container, err = p.pod.Run(ctx, cri.Container{Name: "app", Mounts: []cri.Mount{{Host: p.v.Target, Container: "/data"}}})
	p.must(err)
	does := "RunPodSandbox took %.2f s; CreateContainer mounted the volume in the sandbox, in %.2f s"
	if p.inVMs() {
		does = "RunPodSandbox booted a guest in %.1f s; CreateContainer plugged the disk in and mounted it in %.1f s"
	}
	p.check(true, does, booted.Seconds(), (time.Since(began) - booted).Seconds())
}

func (p *podTelling) startPod(ctx context.Context) {
	p.begin("The pod starts. Its sandbox mounts the volume.")
	p.start(ctx)
	if p.inVMs() {
		var host unix.Utsname
		p.must(unix.Uname(&host))
		here, guest := unix.ByteSliceToString(host.Release[:]), p.exec(ctx, "uname -r")
		p.check(guest != here, "the host runs Linux %s, the container Linux %s", here, guest)
	}
	p.quote(p.exec(ctx, "grep ' /data ' /proc/mounts"))
	p.sum = p.exec(ctx, "dd if=/dev/urandom of=/data/blob bs=1M count=8 2>/dev/null && sync && sha256sum </data/blob")
	p.check(true, "the workload wrote 8 MiB and synced them (sha256 %.12s...)", p.sum)
	p.unseen()
}

func (p *podTelling) measure(ctx context.Context) {
	p.begin("kubelet asks how full it is. The sandbox answers.")
	reply, err := p.v.Stats()
	p.must(err)
	has := reply.GetUsage()[0]
	var blocks, free, size int64
	_, err = fmt.Sscan(p.exec(ctx, "stat -f -c '%b %f %S' /data"), &blocks, &free, &size)
	p.must(err)
	p.check(has.GetTotal() == blocks*size && has.GetUsed() == (blocks-free)*size,
		"total and used through crust-proxy: %d %d; in the container: %d %d", has.GetTotal(), has.GetUsed(), blocks*size, (blocks-free)*size)
}

func (p *podTelling) grow(ctx context.Context) {
	p.begin("The volume grows while it is in use.")
	before := p.exec(ctx, "df -h /data | tail -1")
	err := p.v.Grow(2 * diskSize)
	if p.inVMs() || rig.MayGrow(p.t, "ext4") {
		p.check(err == nil, "ControllerExpandVolume, NodeExpandVolume: %v", status.Code(err))
	} else {
		p.check(status.Code(err) == codes.FailedPrecondition,
			"this machine gives no CAP_SYS_RESOURCE, without which no mounted ext4 grows: %v; it grows for the next pod", status.Code(err))
	}
	p.quote(before + "\n" + p.exec(ctx, "df -h /data | tail -1"))
}

func (p *podTelling) refuseSecondOwner(context.Context) {
	p.begin("A second pod wants the same disk.")
	p.quote(status.Convert(p.wantRefused("pod-two")).Message())
}

func (p *podTelling) killDaemon(ctx context.Context) {
	p.begin("crust-proxy is killed with -9, and started again.")
	p.n.Daemon.Kill()
	p.exec(ctx, "echo still here >/data/meanwhile && sync")
	p.check(true, "meanwhile the pod writes, and notices nothing")
	p.n.Daemon.Start()
	p.n.Driver.Wait(p.t)
	list, err := p.n.Daemon.Crustctl("list").CombinedOutput()
	p.must(err)
	p.check(strings.Contains(string(list), "BOUND"), "the volume is there, with its sandbox")
	p.quote(string(list))
}

func (p *podTelling) endPod(ctx context.Context) {
	p.begin("The pod ends.")
	err := p.v.TryUnpublish()
	p.check(status.Code(err) == codes.Aborted, "NodeUnpublishVolume too early, while it runs: %v", status.Code(err))
	p.must(p.pod.Remove(ctx))
	p.v.Unpublish()
	p.check(true, "NodeUnpublishVolume, when the sandbox has ended: OK")
}

func (p *podTelling) killMachine(ctx context.Context) {
	p.begin("The machine is killed with -9 while the workload writes.")
	p.exec(ctx, "while true; do dd if=/dev/urandom of=/data/more bs=64k count=16 2>/dev/null; done >/dev/null 2>&1 </dev/null &")
	p.check(len(p.n.Machines()) == 1, "for the second pod no machine was started")
	machine, err := p.n.Machine(ctx, p.pod)
	p.must(err)
	err = p.v.TryUnpublish()
	p.check(status.Code(err) == codes.Aborted, "NodeUnpublishVolume too early, while it runs: %v", status.Code(err))
	p.must(unix.Kill(machine, unix.SIGKILL))
	vmnode.End(ctx, p.t, p.pod)
	p.check(len(p.n.Machines()) == 0, "containerd saw the sandbox end, and removed it")
	p.v.Unpublish()
	p.check(true, "NodeUnpublishVolume: OK")
}

func (p *podTelling) readAgain(ctx context.Context) {
	p.begin("The next pod has the volume.")
	p.v.For("pod-three")
	p.must(p.v.TryPublish())
	p.start(ctx)
	sum := p.exec(ctx, "sha256sum </data/blob")
	p.check(p.size(ctx) > diskSize*3/2, "its filesystem has the size to which the volume grew")
	p.check(sum == p.sum, "it reads what the first one wrote (sha256 %.12s...)", sum)
	p.unseen()
	p.must(p.pod.Remove(ctx))
	p.v.Unpublish()
}

func (p *podTelling) verify(ctx context.Context) {
	p.begin("Is the filesystem whole?")
	p.fsck(ctx)
	p.unseen()
	p.must(p.n.Unwatch(p.disk))
	p.v.Delete()
	p.check(len(rig.LoopsLeft(p.n.Daemon.Dir+"/data/")) == 0, "the driver has its volume back, and deleted it")
	p.n.WantClean(p.t)
}
