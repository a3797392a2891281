//go:build system

package vm

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
	"github.com/crust-proxy/crust-proxy/test/rig/vmnode"
)

func TestMain(m *testing.M) { os.Exit(rig.Main(m)) }

const (
	mib = 1 << 20
	// diskSize is large enough for every filesystem; the image is sparse.
	diskSize = 320 * mib
)

var filesystems = []string{"ext4", "xfs", "btrfs"}

// bench is a node in a test.
type bench struct {
	*vmnode.Node
	t *testing.T
}

func newBench(t *testing.T, driver ...string) *bench {
	t.Helper()
	return &bench{Node: vmnode.New(t, "", driver...), t: t}
}

func (b *bench) of(t *testing.T) *bench { return &bench{Node: b.Node, t: t} }

func (b *bench) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	b.t.Cleanup(cancel)
	return ctx
}

// volume is a volume of the driver's, published, whose mounts on the host are watched.
type volume struct {
	*csivolume.Volume
	b      *bench
	device string
}

func (b *bench) volume(name, fs string) *volume {
	b.t.Helper()
	return b.volumeOf("pod-"+name, name, fs)
}

func (b *bench) volumeOf(pod, name, fs string) *volume {
	b.t.Helper()
	v := &volume{Volume: b.Driver.Create(b.t, name, fs, diskSize), b: b}
	v.For(pod)
	v.publish()
	return v
}

// volumes are one of each filesystem, for one pod: machines are slow to boot.
func (b *bench) volumes(pod string) (all []*volume) {
	b.t.Helper()
	for _, fs := range filesystems {
		all = append(all, b.volumeOf(pod, "pv-"+fs, fs))
	}
	return all
}

func (v *volume) publish() {
	v.b.t.Helper()
	v.Publish()
	device := check.Value(v.b.Device(v.Volume))(v.b.t)
	if v.device != "" && v.device != device { // one that may only be read is attached so
		check.Must(v.b.t, v.b.Unwatch(v.device))
	}
	v.device = device
	check.Must(v.b.t, v.b.Watch(device))
}

// giveBack is what kubelet does when the pod has gone. In between, what is on the device
// is looked at by the filesystem's own checker.
func (v *volume) giveBack() {
	v.b.t.Helper()
	v.Unpublish()
	check.Must(v.b.t, v.b.Mounts.CheckNone())
	check.Must(v.b.t, v.b.Unwatch(v.device))
	v.Delete()
}

// unmounted has a look at the volume's filesystem on this machine, when no pod has it.
func (v *volume) unmounted(look func(dir string)) {
	v.b.t.Helper()
	v.Unpublish()
	check.Must(v.b.t, v.b.Mounts.CheckNone())
	check.Must(v.b.t, v.b.Unwatch(v.device))
	dir := v.b.t.TempDir()
	check.Must(v.b.t, unix.Mount(v.device, dir, v.FS, 0, ""))
	look(dir)
	check.Must(v.b.t, unix.Unmount(dir, 0))
	check.Must(v.b.t, v.b.Watch(v.device))
}

// pod runs a sandbox.
func (b *bench) pod(uid string) *cri.Pod {
	b.t.Helper()
	return check.Value(b.CRI.RunPod(b.ctx(), uid, vmnode.Handler, 0))(b.t)
}

// run runs a container.
func (b *bench) run(pod *cri.Pod, name string, mounts ...cri.Mount) string {
	b.t.Helper()
	id, err := pod.Run(b.ctx(), cri.Container{Name: name, Mounts: mounts})
	if err != nil {
		b.t.Fatalf("%v\n%s", err, b.Console(pod))
	}
	return id
}

// exec runs a script that must succeed.
func (b *bench) exec(container, script string) string {
	b.t.Helper()
	out, err := b.CRI.Exec(b.ctx(), container, script)
	check.Require(b.t, err == nil, "%s: %v", script, err)
	return out
}

func (b *bench) remove(pod *cri.Pod) {
	b.t.Helper()
	check.Must(b.t, pod.Remove(b.ctx()))
}

func at(v *volume) cri.Mount { return cri.Mount{Host: v.Target, Container: "/data"} }

// df gives total, used and available bytes as the container sees them.
func (b *bench) df(container string) (total, used, available int64) {
	b.t.Helper()
	var blocks, free, open, size int64
	check.Must(b.t, check.Err(fmt.Sscan(b.exec(container, "stat -f -c '%b %f %a %S' /data"), &blocks, &free, &open, &size)))
	return blocks * size, (blocks - free) * size, open * size
}

// wantStats wants kubelet to hear what df says in the guest.
func (v *volume) wantStats(container string) (total int64) {
	v.b.t.Helper()
	v.WantUsage(func() csivolume.Usage {
		var u csivolume.Usage
		u.Total, u.Used, u.Available = v.b.df(container)
		total = u.Total
		return u
	})
	return total
}

// wantSum wants a file on this machine to have the checksum that a container printed.
func (b *bench) wantSum(path, printed string) {
	b.t.Helper()
	sum := fmt.Sprintf("%x", sha256.Sum256(check.Value(os.ReadFile(path))(b.t)))
	check.That(b.t, strings.HasPrefix(printed, sum), "%s has the checksum %s, not %s", path, sum, printed)
}
