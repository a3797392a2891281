//go:build system

package vm

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
	"github.com/crust-proxy/crust-proxy/test/rig/vmnode"
)

// writer is a script that writes files, each named by its checksum, until it is killed.
const writer = `i=0; while true; do
	dd if=/dev/urandom of=/data/new bs=64k count=2 2>/dev/null || exit 1
	mv /data/new /data/$(sha256sum </data/new | cut -d' ' -f1).sum && i=$((i + 1)) && echo $i >/tmp/count
	[ $((i % 50)) != 0 ] || rm -f /data/*.sum
done`

// wantProgress waits until the writer has written more.
func (b *bench) wantProgress(container string) {
	b.t.Helper()
	// The file is empty for a moment, each time.
	b.exec(container, `was=
for i in $(seq 300); do
	now=$(cat /tmp/count 2>/dev/null)
	was=${was:-$now}
	[ -n "$now" ] && [ "$now" -gt "$was" ] && exit 0
	sleep 0.1
done
exit 1`)
}

// scene is a pod that writes to a volume.
type scene struct {
	*bench
	v         *volume
	pod       *cri.Pod
	container string
	sum       string // of the file "blob", which was synced
}

func (b *bench) scene(name, fs string) *scene {
	b.t.Helper()
	s := &scene{bench: b, v: b.volume(name, fs)}
	s.pod = b.pod(s.v.Pod)
	s.container = b.run(s.pod, "main", at(s.v))
	s.sum = b.exec(s.container, "dd if=/dev/urandom of=/data/blob bs=64k count=16 2>/dev/null && sync && sha256sum </data/blob")
	b.exec(s.container, "("+writer+") >/dev/null 2>&1 </dev/null &")
	b.wantProgress(s.container)
	return s
}

// machine gives the processes of the pod's sandbox.
func (s *scene) machine() (supervisor, qemu, shim int) {
	s.t.Helper()
	var err error
	supervisor, err = s.pod.Pid(s.ctx())
	check.Must(s.t, err)
	qemu, err = s.Machine(s.ctx(), s.pod)
	check.Must(s.t, err)
	shim, err = s.pod.Shim(s.ctx())
	check.Must(s.t, err)
	return supervisor, qemu, shim
}

// wantOver waits until no machine has the volume. One that hangs is given up after three
// pings.
func (s *scene) wantOver() {
	s.t.Helper()
	for deadline := time.Now().Add(4 * time.Minute); len(s.Machines()) > 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			s.t.Fatalf("the machine lives on\n%s", s.Console(s.pod))
		}
	}
}

// over is the end of each scene: what was synced is on the device, the filesystem is
// whole once its journal has been replayed, and the next pod has it.
func (s *scene) over() {
	s.t.Helper()
	vmnode.End(s.ctx(), s.t, s.pod)
	s.wantOver()
	s.v.unmounted(func(dir string) { s.wantSum(dir+"/blob", s.sum) })
	s.v.checkDisk()
	s.v.For(s.v.Pod + "-next")
	s.v.publish()
	next := s.bench.pod(s.v.Pod)
	if got := s.exec(s.run(next, "main", at(s.v)), "sha256sum </data/blob"); got != s.sum {
		s.t.Errorf("the next pod reads %q", got)
	}
	s.remove(next)
	s.v.giveBack()
}

// TestKilledMachines kills what a sandbox consists of, while its pod writes. Each time the
// machine is over, containerd learns of it, and nothing that was synced is lost.
func TestKilledMachines(t *testing.T) {
	b := newBench(t)
	for i, c := range []struct {
		name   string
		config map[string]any
		kill   func(supervisor, qemu, shim int) error
	}{
		{"qemu", nil, func(_, qemu, _ int) error { return unix.Kill(qemu, unix.SIGKILL) }},
		{"supervisor", nil, func(supervisor, _, _ int) error { return unix.Kill(supervisor, unix.SIGKILL) }},
		// The machine must not write on when nobody knows it any more.
		{"shim", nil, func(_, _, shim int) error { return unix.Kill(shim, unix.SIGKILL) }},
		{"hung guest", map[string]any{"hangTimeoutSeconds": 15}, func(_, qemu, _ int) error { return unix.Kill(qemu, unix.SIGSTOP) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			b.Configure(t, c.config)
			s := b.of(t).scene("pv-"+string(rune('a'+i)), filesystems[i%len(filesystems)])
			check.Must(t, c.kill(s.machine()))
			s.wantOver()
			check.Eventually(t, "containerd knows that the sandbox is over", func() bool {
				state, err := s.pod.State(s.ctx())
				return err != nil || state == runtimeapi.PodSandboxState_SANDBOX_NOTREADY
			})
			s.over()
		})
	}
	b.WantClean(t)
}

// TestAPodOutlivesOthers: containerd and crust-proxy are killed, and the pod writes on.
func TestAPodOutlivesOthers(t *testing.T) {
	b := newBench(t)
	s := b.scene("pv", "ext4")
	b.CRI.Process.Kill()
	b.Daemon.Kill()
	time.Sleep(3 * time.Second) // a machine that ends with them would have ended
	check.Must(t, b.CRI.Process.Start())
	b.Daemon.Start()
	b.wantProgress(s.container)
	s.v.wantReadable()
	s.over()
	b.WantClean(t)
}

// wantReadable waits until kubelet gets stats.
func (v *volume) wantReadable() {
	v.b.t.Helper()
	check.Eventually(v.b.t, "stats are answered", func() bool { _, err := v.Stats(); return err == nil })
}

// TestGrowUnderAWriter: the filesystem grows while a pod writes.
func TestGrowUnderAWriter(t *testing.T) {
	b := newBench(t)
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			s := b.of(t).scene("pv-"+fs, fs)
			before, _, _ := s.df(s.container)
			check.Must(t, s.v.Grow(2*diskSize))
			if after, _, _ := s.df(s.container); after < before+diskSize*8/10 {
				t.Errorf("the filesystem went from %d to %d", before, after)
			}
			s.wantProgress(s.container)
			s.remove(s.pod)
			s.v.unmounted(func(dir string) { s.wantSum(dir+"/blob", s.sum) })
			s.v.checkDisk()
			s.v.giveBack()
		})
	}
	b.WantClean(t)
}
