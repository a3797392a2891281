//go:build system

package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
	"github.com/crust-proxy/crust-proxy/reference/vm/qemu"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
	"github.com/crust-proxy/crust-proxy/test/rig/vmnode"
)

// TestKataBeforeARealGuest takes a volume through our Kata handler into the kernel of a
// guest. The shims are played; what they answer is what this kernel says.
func TestKataBeforeARealGuest(t *testing.T) {
	b := newBench(t)
	b.Daemon.Kill()
	b.Daemon.Handlers = "" // Kata's is the default
	// Beside the daemon's other directories, the sockets' paths would be too long.
	b.Daemon.GoSandboxes, b.Daemon.RustSandboxes = "/run/vc/sbs", "/run/kata"
	b.Daemon.Start()
	t.Run("go", func(t *testing.T) { b.of(t).kataLife("pv-go", kata.Go) })
	t.Run("runtime-rs", func(t *testing.T) { b.of(t).kataLife("pv-rs", kata.Rust) })
	b.WantClean(t)
}

func (b *bench) kataLife(name string, flavor kata.Flavor) {
	v := &volume{Volume: b.Driver.Create(b.t, name, "ext4", diskSize), b: b}
	v.Publish()
	pod := check.Value(b.CRI.RunPod(b.ctx(), v.Pod, "", 0))(b.t)
	b.run(pod, "app", at(v)) // for containerd to have the pod's containers and mounts
	g := bootKata(flavor, pod.ID, v)
	app := []kata.Mount{{Destination: "/data", Source: v.Target}}
	check.Must(b.t, g.vm.CreateContainer("first", app))
	check.Says(b.t, "the container's kernel", g.exec("cat /proc/sys/kernel/osrelease"), "-cloud-")
	empty := g.wantStats()
	sum := g.exec("dd if=/dev/urandom of=/data/blob bs=64k count=320 2>/dev/null && for i in 1 2 3; do touch /data/$i; done && sync && busybox sha256sum </data/blob")
	full := g.wantStats()
	check.That(b.t, full[0].GetUsed() >= empty[0].GetUsed()+20*mib && full[1].GetUsed() == empty[1].GetUsed()+4,
		"before it wrote %v, after it %v", empty, full)

	// The shim outlives its machine for a moment.
	g.machine.Kill()
	check.Code(b.t, check.Err(v.Stats()), codes.Unavailable)
	check.Code(b.t, v.TryUnpublish(), codes.Aborted)
	check.Must(b.t, g.shim.Stop())
	vmnode.End(b.ctx(), b.t, pod)
	v.unmounted(func(dir string) { b.wantSum(dir+"/blob", sum) })
	rig.Fsck(v.T, v.FS, v.device)
	v.giveBack()
}

// kataGuest is a Kata sandbox with one volume. What its shim asks of VMM and agent, QEMU and the agent of crust-vm do.
type kataGuest struct {
	guest
	shim    *kata.Shim
	vm      *kata.VM
	machine *qemu.Machine
	v       *volume

	container string
	volume    string // its name in the guest
}

// bootKata boots the machine of a sandbox and starts its shim.
func bootKata(flavor kata.Flavor, id string, v *volume) *kataGuest {
	t, d := v.b.t, v.b.Daemon
	program := check.Value(exec.LookPath("qemu-system-x86_64"))(t)
	kernel, archive, err := initramfs.Build(vmnode.Kernel(t), rig.Program(t, "crust-vm-agent"), t.TempDir())
	check.Must(t, err)
	g := &kataGuest{guest: guest{t: t}, v: v}
	g.machine = check.Value(qemu.Start(t.Context(), qemu.Config{
		Program: program, Virtiofsd: "/usr/lib/qemu/virtiofsd", Kernel: kernel, Initramfs: archive, Append: initramfs.KernelArguments,
		MemoryMiB: 320, CPUs: 1, User: 1_900_000_000 + uint32(os.Getpid()), //nolint:gosec // at most four million
		Shared: rootDir(t), Tag: "shared", Port: wire.Port, Dir: t.TempDir(),
	}))(t)
	t.Cleanup(g.machine.Kill)
	g.Client = wire.NewClient(g.machine.Agent)
	_, err = g.StartSandbox(t.Context(), &wire.StartSandboxRequest{Hostname: "pod", UnixNanos: time.Now().UnixNano(), SharedTag: "shared"})
	check.Require(t, err == nil, "%v\n%s", err, g.machine.Console)
	sockets := map[kata.Flavor]string{kata.Go: d.GoSandboxes, kata.Rust: d.RustSandboxes}
	g.shim = check.Value(kata.Start(kata.Options{Flavor: flavor, SandboxID: id, Sandboxes: sockets[flavor], Shared: d.SharedSandboxes}))(t)
	t.Cleanup(func() { _ = g.shim.Stop() })
	g.vm = &kata.VM{
		Flavor: flavor, SandboxID: id, DirectVolumes: d.Kata, Shared: d.SharedSandboxes, Plug: g.plug, Agent: g.createContainer,
	}
	return g
}

// plug attaches a device as a VMM does, plainly.
func (g *kataGuest) plug(device string, readOnly bool) (slot string, err error) {
	file, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		return "", err
	}
	g.v.device, slot = device, "slot-1"
	_, err = g.machine.Plug(g.t.Context(), slot, file, readOnly)
	return slot, errors.Join(err, g.v.b.Watch(device))
}

// createContainer is the agent's part: it mounts the volume and runs the container.
func (g *kataGuest) createContainer(r kata.Request) error {
	if len(r.Storages) != 1 {
		return fmt.Errorf("%d volumes, and the pod has one", len(r.Storages))
	}
	storage := r.Storages[0]
	g.container, g.volume = r.Container, abi.DirName(storage.MountPoint)
	name := storage.MountPoint // by which the shim is asked for it
	if g.vm.Flavor == kata.Go {
		name = g.v.device
	}
	if _, err := g.AddVolume(g.t.Context(), &wire.AddVolumeRequest{
		Volume: g.volume, Serial: storage.Source, FsType: storage.FSType, Options: storage.Options,
	}); err != nil {
		return err
	}
	g.shim.Mount(name, g.statfs)
	is := spec("while :; do sleep 1000; done")
	is.Root.Path = wire.SharedDir
	is.Mounts = append(is.Mounts, specs.Mount{Destination: r.Mounts[0].Destination, Options: r.Mounts[0].Options})
	err := g.create(r.Container, is, &wire.VolumeMount{Mount: uint32(len(is.Mounts) - 1), Volume: g.volume}) //nolint:gosec // a few
	if err == nil {
		g.start(g.t, r.Container)
	}
	return err
}

// statfs is what the guest's kernel says. Both count what is kept for root as not used.
func (g *kataGuest) statfs() (st unix.Statfs_t, err error) {
	is, err := g.GetVolumeStats(g.t.Context(), &wire.GetVolumeStatsRequest{Volume: g.volume})
	if err != nil {
		return st, err
	}
	st.Bsize = 1
	for _, u := range is.GetUsage() {
		total, free := uint64(u.GetTotal()), uint64(u.GetTotal()-u.GetUsed()) //nolint:gosec // checked by the client
		if u.GetUnit() == abi.UnitBytes {
			st.Blocks, st.Bfree = total, free
		} else {
			st.Files, st.Ffree = total, free
		}
	}
	return st, nil
}

// exec runs a script in the container.
func (g *kataGuest) exec(script string) string {
	g.t.Helper()
	raw := check.Value(json.Marshal(spec(script).Process))(g.t)
	process := &wire.Process{Container: g.container, Exec: "script"}
	check.Must(g.t, check.Err(g.ExecProcess(g.t.Context(), &wire.ExecProcessRequest{Process: process, Spec: raw})))
	out := g.output(g.t, process)
	ended := check.Value(g.WaitProcess(g.t.Context(), &wire.WaitProcessRequest{Process: process}))(g.t)
	check.Require(g.t, ended.GetExitCode() == 0, "%s: %v, %s", script, ended, out)
	check.Must(g.t, check.Err(g.DeleteProcess(g.t.Context(), &wire.DeleteProcessRequest{Process: process})))
	return out
}

// wantStats wants kubelet to hear what the container sees: bytes and inodes.
func (g *kataGuest) wantStats() []*csi.VolumeUsage {
	g.t.Helper()
	var reply *csi.NodeGetVolumeStatsResponse
	check.Eventually(g.t, "stats are what the container sees", func() (is bool) {
		var err error
		var seen [5]int64
		check.Must(g.t, check.Err(fmt.Sscan(g.exec("stat -f -c '%S %b %f %c %d' /data"), &seen[0], &seen[1], &seen[2], &seen[3], &seen[4])))
		reply, err = g.v.Stats()
		return err == nil && slices.EqualFunc(reply.GetUsage(), [][3]int64{
			{seen[0] * seen[1], seen[0] * seen[2], int64(csi.VolumeUsage_BYTES)}, {seen[3], seen[4], int64(csi.VolumeUsage_INODES)},
		}, func(u *csi.VolumeUsage, want [3]int64) bool {
			return want == [3]int64{u.GetTotal(), u.GetAvailable(), int64(u.GetUnit())} && u.GetUsed() == u.GetTotal()-u.GetAvailable()
		})
	})
	return reply.GetUsage()
}
