//go:build system

package vm

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
	"github.com/crust-proxy/crust-proxy/test/rig/vmnode"
)

// scene is a pod that writes to a volume.
type scene struct {
	*bench
	v         *volume
	pod       *cri.Pod
	container string
	sum       string // of the file "blob", which was synced
	late      bool   // whether the file "late" was not, and must be there nevertheless
}

func (b *bench) scene(name, fs string) *scene {
	b.t.Helper()
	v := b.volume(name, fs)
	pod := b.pod(v.Pod)
	s := &scene{bench: b, v: v, pod: pod, container: b.run(pod, "main", at(v))}
	s.writes()
	return s
}

// log gives what the sandbox says from now on. Its log goes when containerd learns of its
// end, which may be before anybody reads it.
func (s *scene) log() func() string {
	s.t.Helper()
	file := check.Value(os.Open(filepath.Join(s.State, s.pod.ID, "log")))(s.t)
	return func() string {
		raw, err := io.ReadAll(file)
		check.Must(s.t, errors.Join(err, file.Close()))
		return string(raw)
	}
}

func (s *scene) writes() {
	s.t.Helper()
	s.sum = s.exec(s.container, "dd if=/dev/urandom of=/data/blob bs=64k count=16 2>/dev/null && sync && sha256sum </data/blob")
	s.exec(s.container, cri.Writer)
}

// over is the end of each scene: what was synced is on the device, the filesystem is
// whole once its journal has been replayed, and the next pod may have it.
func (s *scene) over() {
	s.t.Helper()
	vmnode.End(s.ctx(), s.t, s.pod)
	s.wantOver()
	s.v.unmounted(func(dir string) {
		s.wantSum(dir+"/blob", s.sum)
		late, err := os.ReadFile(dir + "/late")
		check.That(s.t, !s.late || string(late) == "late\n", "what was not synced is %q, %v", late, err)
	})
	rig.Fsck(s.v.T, s.v.FS, s.v.device)
	s.v.For(s.v.Pod + "-next")
	s.v.publish()
	s.v.giveBack()
}

// wantOver waits until no machine is left.
func (b *bench) wantOver() {
	b.t.Helper()
	left := check.Left(8*time.Minute, 50*time.Millisecond, b.Machines) // without virtiofsd, it is tried for 90 s
	check.Require(b.t, len(left) == 0, "machines that are not over: %v", left)
}

// machine are the processes of a sandbox.
type machine struct{ qemu, supervisor, shim int }

// machine waits for the sandbox's machine. There is one alone, and it may be booting.
func (b *bench) machine() (m machine) {
	b.t.Helper()
	check.Eventually(b.t, "there is a machine", func() bool {
		found := slices.DeleteFunc(b.Machines(), isTrial)
		if len(found) != 1 {
			return false
		}
		m.qemu = found[0]
		return m.parents() == nil
	})
	return m
}

// parents finds the supervisor, and the shim above it, between which the command is that waits for the boot.
func (m *machine) parents() (err error) {
	if m.supervisor, err = rig.Parent(m.qemu); err != nil {
		return err
	}
	for m.shim = m.supervisor; err == nil && !isShim(m.shim); {
		m.shim, err = rig.Parent(m.shim)
	}
	return err
}

// isTrial tells whether a QEMU only finds out whether there is KVM.
func isTrial(pid int) bool {
	command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return !bytes.Contains(command, []byte("-initrd"))
}

func isShim(pid int) bool {
	program, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	return filepath.Base(program) == "containerd-shim-runc-v2"
}

// hasOpen tells whether the machine has the device, which its guest may not have mounted.
func (m machine) hasOpen(device string) bool {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", m.qemu))
	return slices.ContainsFunc(files, func(file string) bool {
		target, _ := os.Readlink(file)
		return target == device
	})
}

// victims are what a sandbox consists of. The agent is killed from within its guest, by the
// key of Linux that kills all processes but the first.
var victims = map[string]func(m machine) error{
	"qemu":       func(m machine) error { return unix.Kill(m.qemu, unix.SIGKILL) },
	"supervisor": func(m machine) error { return unix.Kill(m.supervisor, unix.SIGKILL) },
	// Of its two processes, one is the child of the other.
	"virtiofsd": func(m machine) (err error) {
		for _, pid := range rig.Children(m.supervisor) {
			if pid != m.qemu {
				err = errors.Join(err, unix.Kill(pid, unix.SIGKILL))
			}
		}
		return err
	},
	// The machine must not write on when nobody knows it any more.
	"shim": func(m machine) error { return unix.Kill(m.shim, unix.SIGKILL) },
}

const killAgent, panicGuest = "echo i >/proc/sysrq-trigger", "echo c >/proc/sysrq-trigger"

// TestKilledMachines kills what a sandbox consists of, while its pod writes. Each time the machine is over, containerd
// learns of it, and nothing that was synced is lost. If only the agent has ended, nothing at all is.
func TestKilledMachines(t *testing.T) {
	check.Must(t, os.WriteFile("/proc/self/oom_score_adj", []byte("100"), 0)) // containerd's, and so the shims'
	b := newBench(t)
	b.CRI.ShimsAreKilled = true
	kill := func(victim string) func(*scene) {
		return func(s *scene) { check.Must(s.t, victims[victim](s.machine())) }
	}
	inGuest := func(script string) func(*scene) {
		return func(s *scene) { _, _ = s.CRI.Exec(s.ctx(), s.container, script) }
	}
	for i, c := range []struct {
		name   string
		config map[string]any
		kill   func(*scene)
		says   string // in the sandbox's log
	}{
		{"qemu", nil, kill("qemu"), "signal: killed"},
		{"virtiofsd", nil, func(s *scene) {
			m := s.machine()
			for _, pid := range rig.Children(m.supervisor) {
				adj := check.Value(os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid)))(s.t)
				limits := strings.Fields(string(check.Value(os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid)))(s.t)))
				core, files := limits[slices.Index(limits, "core")+3], limits[slices.Index(limits, "open")+3]
				most, _ := strconv.Atoi(files)
				check.That(s.t, string(adj) == "0\n" && core == "0" && most > 0 && most <= 512<<9, "%s: %s %s %s", rig.DescribeProcess(pid), adj, core, files)
			}
			check.Must(s.t, victims["virtiofsd"](m))
		}, "virtiofsd has ended"},
		{"supervisor", nil, kill("supervisor"), ""},
		{"shim", nil, func(s *scene) {
			m := s.machine()
			s.CRI.Process.Kill() // containerd would end the machine; the promise is that it ends by itself
			check.Must(s.t, victims["shim"](m))
			s.wantOver()
			check.Must(s.t, s.CRI.Process.Start())
		}, "shim of the sandbox is gone"},
		{"agent", nil, func(s *scene) { s.late = true; inGuest("echo late >/data/late; " + killAgent)(s) }, "agent has ended"},
		{"guest", nil, inGuest(panicGuest), "Kernel panic"},
		{"hung guest", map[string]any{"hangTimeoutSeconds": hang}, func(s *scene) {
			s.survivesAFreeze()
			check.Must(s.t, unix.Kill(s.machine().qemu, unix.SIGSTOP))
		}, "does not answer"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b.Configure(t, c.config)
			s := b.of(t).scene("pv-"+string(rune('a'+i)), filesystems[i%len(filesystems)])
			said := s.log()
			c.kill(s)
			s.wantOver()
			check.Eventually(t, "containerd knows that the sandbox is over", func() bool {
				state, err := s.pod.State(s.ctx())
				return err != nil || state == runtimeapi.PodSandboxState_SANDBOX_NOTREADY
			})
			log := said()
			check.That(t, strings.Contains(log, c.says), "the sandbox's log does not say %q:\n%s", c.says, log)
			s.over()
		})
	}
	b.WantClean(t)
}

// TestKilledWhileTheyBegin kills the same while the machine boots, and while the guest gets
// a disk: what is asked of containerd fails then, and the next attempt succeeds.
func TestKilledWhileTheyBegin(t *testing.T) {
	b := newBench(t)
	b.CRI.ShimsAreKilled = true
	for name := range victims {
		t.Run("boot/"+name, func(t *testing.T) {
			b := b.of(t)
			made := check.Begin(func() error { return check.Err(b.CRI.RunPod(b.ctx(), "pod-"+name, vmnode.Handler, 0)) })
			check.Must(t, victims[name](b.machine()))
			wantFailed(t, <-made)
			b.wantOver()
		})
	}
	t.Run("boot/agent", func(t *testing.T) {
		b := b.of(t)
		b.Configure(t, map[string]any{"agentProgram": b.Program}) // it ends at once
		defer b.Configure(t, map[string]any{})
		_, err := b.CRI.RunPod(b.ctx(), "pod-agent", vmnode.Handler, 0)
		wantFailed(t, err)
		check.That(t, strings.Contains(fmt.Sprint(err), "Attempted to kill init"), "the error does not say why the machine has ended")
		b.wantOver()
	})
	for i, name := range rig.Sample([]string{"supervisor", "shim", "qemu", "agent"}, 3) {
		t.Run("plug/"+name, func(t *testing.T) {
			b.of(t).killedWhilePlugged("pv-"+name, filesystems[i%len(filesystems)], victims[name])
		})
	}
	b.WantClean(t)
}

// wantFailed is for what was asked of containerd, which must not wait for nobody.
func wantFailed(t *testing.T, err error) {
	t.Helper()
	check.That(t, err != nil && status.Code(err) != codes.DeadlineExceeded, "it ended with: %v", err)
	t.Logf("containerd says: %v", err)
}

func (b *bench) killedWhilePlugged(name, fs string, kill func(machine) error) {
	v := b.volume(name, fs)
	pod := b.pod(v.Pod)
	m := b.machine()
	if kill == nil {
		b.exec(b.run(pod, "beside"), "(until [ -e /sys/block/vda ]; do :; done; "+killAgent+") >/dev/null 2>&1 </dev/null &")
	}
	made := check.Begin(func() error {
		return check.Err(pod.Run(b.ctx(), cri.Container{Name: "main", Mounts: []cri.Mount{at(v)}}))
	})
	if kill != nil {
		check.Eventually(b.t, "the machine has the disk", func() bool { return m.hasOpen(v.device) })
		check.Must(b.t, kill(m))
	}
	wantFailed(b.t, <-made)
	b.wantOver()
	vmnode.End(b.ctx(), b.t, pod)
	v.unmounted(func(string) {})
	rig.Fsck(v.T, v.FS, v.device)
	v.publish()
	v.giveBack()
}

// TestKilledWhileTheyEnd kills the same when the containers have ended, and the guest unmounts.
func TestKilledWhileTheyEnd(t *testing.T) {
	b := newBench(t)
	b.CRI.ShimsAreKilled = true
	for i, name := range rig.Sample([]string{"shim", "qemu", "supervisor"}, 3) {
		t.Run(name, func(t *testing.T) {
			s := b.of(t).scene("pv-"+name, filesystems[i%len(filesystems)])
			m := s.machine()
			stopped := s.stop()
			if err := victims[name](m); !errors.Is(err, unix.ESRCH) { // it may have ended as fast
				check.Must(t, err)
			}
			if err := <-stopped; err != nil {
				t.Logf("containerd says: %v", err)
			}
			s.over()
		})
	}
	b.WantClean(t)
}

// stop has the pod be stopped, and returns when its container has ended.
func (s *scene) stop() <-chan error {
	s.t.Helper()
	container := check.Value(s.CRI.Pid(s.ctx(), s.container))(s.t)
	stopped := check.Begin(func() error { return s.pod.Stop(s.ctx()) })
	check.Eventually(s.t, "the container has ended", func() bool { return unix.Kill(container, 0) != nil })
	if len(s.Machines()) == 0 {
		s.t.Log("the machine has ended as fast as its container")
	}
	return stopped
}

// TestAPodOutlivesOthers: containerd and crust-proxy are killed while the guest gets a disk,
// while the pod writes, and while it ends. It writes on, and is in nobody's way.
func TestAPodOutlivesOthers(t *testing.T) {
	b := newBench(t)
	s := &scene{bench: b, v: b.volume("pv", "ext4")}
	restart := func() {
		check.Must(t, b.CRI.Process.Start())
		b.Daemon.Start()
	}
	s.pod = b.pod(s.v.Pod)
	m := b.machine()
	made := check.Begin(func() error {
		return check.Err(s.pod.Run(b.ctx(), cri.Container{Name: "main", Mounts: []cri.Mount{at(s.v)}}))
	})
	check.Eventually(t, "the machine has the disk", func() bool { return m.hasOpen(s.v.device) })
	b.CRI.Process.Kill()
	b.Daemon.Kill()
	wantFailed(t, <-made)
	restart()
	s.container = check.Value(s.pod.Run(b.ctx(), cri.Container{Name: "main", Attempt: 1, Mounts: []cri.Mount{at(s.v)}}))(t)
	s.writes()

	b.CRI.Process.Kill()
	b.Daemon.Kill()
	time.Sleep(3 * time.Second) // a machine that ends with them would have ended
	restart()
	b.exec(s.container, cri.Progress)
	check.Succeeds(t, "stats are answered", func() error { _, err := s.v.Stats(); return err })

	stopped := s.stop()
	b.CRI.Process.Kill()
	b.Daemon.Kill()
	t.Logf("containerd says: %v", <-stopped)
	restart()
	s.over()
	b.WantClean(t)
}

// hang is a hangTimeoutSeconds.
const hang = 25

// survivesAFreeze: who waits to write to a frozen volume cannot be killed. That costs the pod
// no machine, and whoever froze the volume no freeze.
func (s *scene) survivesAFreeze() {
	s.t.Helper()
	crust := func(args ...string) {
		cmd := exec.Command(s.Program, append([]string{"crust"}, args...)...) //nolint:gosec // ours
		cmd.Env = append(os.Environ(), s.Env()...)
		check.Run(s.t, cmd)
	}
	crust("freeze", s.v.Target, "300")
	process := check.Value(s.CRI.Pid(s.ctx(), s.container))(s.t)
	stopped := check.Begin(func() error {
		return check.Err(s.CRI.CRI.StopContainer(s.ctx(), &runtimeapi.StopContainerRequest{ContainerId: s.container}))
	})
	m := s.machine()
	time.Sleep((hang + 10) * time.Second)
	check.That(s.t, unix.Kill(m.qemu, 0) == nil && unix.Kill(process, 0) == nil,
		"of a pod with a frozen volume the container ended (%v), or the machine (%v)", unix.Kill(process, 0), unix.Kill(m.qemu, 0))
	crust("thaw", s.v.Target)
	check.Eventually(s.t, "the container has ended", func() bool { return unix.Kill(process, 0) != nil })
	s.t.Logf("containerd says: %v", <-stopped)
	check.That(s.t, unix.Kill(m.qemu, 0) == nil, "the machine has ended")
}
