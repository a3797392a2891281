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

// vmTelling is the showing with virtual machines.
type vmTelling struct {
	teller
	n              *vmnode.Node
	pod            *cri.Pod
	container, sum string
}

// storyOfVMs is the whole way of one volume into the guests of two machines.
func storyOfVMs(t rig.T) {
	p := &vmTelling{teller: teller{t: t}}
	p.tell(p.publish, p.startPod, p.measure, p.grow, p.refuseSecondOwner, p.killMachine, p.readAgain, p.verify)
}

func (p *vmTelling) publish(context.Context) {
	p.begin("containerd runs pods by crust-vm. A CSI driver that knows nothing of this makes a volume for one.")
	p.n = vmnode.New(p.t, built())
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

// unseen checks that the host's kernel has not mounted the disk since it was published.
func (p *vmTelling) unseen() {
	_, err := os.Stat("/sys/fs/ext4/" + filepath.Base(p.disk))
	never := p.n.Mounts.CheckNone()
	p.check(os.IsNotExist(err) && never == nil, "the host's kernel never had the filesystem: not in mountinfo, at any time, nor in /sys/fs/ext4")
}

// exec runs a script in the pod's container.
func (p *vmTelling) exec(ctx context.Context, script string) string {
	p.t.Helper()
	out, err := p.n.CRI.Exec(ctx, p.container, script)
	p.must(err)
	return strings.TrimSpace(out)
}

// start runs the pod and its container, and tells how long it took.
func (p *vmTelling) start(ctx context.Context) {
	began := time.Now()
	var err error
	p.pod, err = p.n.CRI.RunPod(ctx, p.v.Pod, vmnode.Handler, 0)
	p.must(err)
	booted := time.Since(began)
	p.container, err = p.pod.Run(ctx, cri.Container{Name: "app", Mounts: []cri.Mount{{Host: p.v.Target, Container: "/data"}}})
	p.must(err)
	p.check(true, "RunPodSandbox booted a guest in %.1f s; CreateContainer plugged the disk in and mounted it in %.1f s",
		booted.Seconds(), (time.Since(began) - booted).Seconds())
}

func (p *vmTelling) startPod(ctx context.Context) {
	p.begin("The pod starts, in a virtual machine of its own.")
	p.start(ctx)
	var host unix.Utsname
	p.must(unix.Uname(&host))
	here, guest := unix.ByteSliceToString(host.Release[:]), p.exec(ctx, "uname -r")
	p.check(guest != here, "the host runs Linux %s, the container Linux %s", here, guest)
	p.quote(p.exec(ctx, "grep ' /data ' /proc/mounts"))
	p.sum = p.exec(ctx, "dd if=/dev/urandom of=/data/blob bs=1M count=8 2>/dev/null && sync && sha256sum </data/blob")
	p.check(true, "the workload wrote 8 MiB and synced them (sha256 %.12s...)", p.sum)
	p.unseen()
}

func (p *vmTelling) measure(ctx context.Context) {
	p.begin("kubelet asks how full it is. The guest answers.")
	reply, err := p.v.Stats()
	p.must(err)
	has := reply.GetUsage()[0]
	var blocks, free, size int64
	_, err = fmt.Sscan(p.exec(ctx, "stat -f -c '%b %f %S' /data"), &blocks, &free, &size)
	p.must(err)
	p.check(has.GetTotal() == blocks*size && has.GetUsed() == (blocks-free)*size,
		"total and used through crust-proxy: %d %d; in the container: %d %d", has.GetTotal(), has.GetUsed(), blocks*size, (blocks-free)*size)
}

func (p *vmTelling) grow(ctx context.Context) {
	p.begin("The volume grows while it is in use.")
	before := p.exec(ctx, "df -h /data | tail -1")
	err := p.v.Grow(2 * diskSize)
	p.check(err == nil, "ControllerExpandVolume, NodeExpandVolume: %v", status.Code(err))
	p.quote(before + "\n" + p.exec(ctx, "df -h /data | tail -1"))
}

func (p *vmTelling) refuseSecondOwner(context.Context) {
	p.begin("A second pod wants the same disk.")
	p.quote(status.Convert(p.wantRefused("pod-two")).Message())
	p.check(len(p.n.Machines()) == 1, "no machine was started for it")
}

func (p *vmTelling) killMachine(ctx context.Context) {
	p.begin("The machine is killed with -9 while the workload writes.")
	p.exec(ctx, "while true; do dd if=/dev/urandom of=/data/more bs=64k count=16 2>/dev/null; done >/dev/null 2>&1 </dev/null &")
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

func (p *vmTelling) readAgain(ctx context.Context) {
	p.begin("The next pod has the volume.")
	p.v.For("pod-three")
	p.must(p.v.TryPublish())
	p.start(ctx)
	sum := p.exec(ctx, "sha256sum </data/blob")
	p.check(sum == p.sum, "its guest replayed the journal; what was synced is there (sha256 %.12s...)", sum)
	p.unseen()
	p.must(p.pod.Remove(ctx))
	p.v.Unpublish()
}

func (p *vmTelling) verify(ctx context.Context) {
	p.begin("Is the filesystem whole?")
	p.fsck(ctx)
	p.unseen()
	p.must(p.n.Unwatch(p.disk))
	p.v.Delete()
	p.check(len(rig.LoopsLeft(p.n.Daemon.Dir+"/data/")) == 0, "the driver has its volume back, and deleted it")
	p.n.WantClean(p.t)
}
