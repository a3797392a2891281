//go:build system

package vm

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
	"github.com/crust-proxy/crust-proxy/test/rig/snapshots"
	"github.com/crust-proxy/crust-proxy/test/rig/vmnode"
)

// TestLifeOfAVolume takes volumes of a CSI driver, sound and damaged ones, through everything that kubelet does with
// them, in two machines, each with another virtiofsd. Never is one mounted on the host.
func TestLifeOfAVolume(t *testing.T) {
	t.Setenv("CRUST_FAILPOINTS", "crust-vm-unplugged=sleep:15s")
	pool := rig.Pool(t, "xfs", rig.Disk(t, 8<<30, "xfs")) // which shares data, so that volumes in use have snapshots
	b := newBench(t, "--data-dir", pool)
	b.Driver.Data = pool
	const uid = "pod-life"
	volumes, damaged := b.volumes(uid), b.damagedVolumes(uid)
	pod := b.pod(uid)
	main := b.run(pod, "main")
	b.wantGroups(pod, main)
	b.wantTerminal(pod)
	for _, v := range damaged {
		v.wantUnmountable(pod)
	}
	b.exec(main, "true")
	sums := make(map[string]string)
	for _, v := range volumes {
		sums[v.FS] = v.inUse(pod)
	}
	volumes[0].wantOneOwner("pod-other")
	b.wantUnplugged(pod, volumes)
	check.Must(t, b.Mounts.CheckNone())
	for _, v := range damaged {
		v.giveBack()
	}
	for _, v := range volumes {
		v.unmounted(func(dir string) { b.wantSum(dir+"/blob", sums[v.FS]) })
		rig.Fsck(v.T, v.FS, v.device)
		v.ReadOnly = v == volumes[0]
		v.publish()
	}
	b.Configure(t, map[string]any{"virtiofsd": vmnode.OtherVirtiofsd(t)})
	again := b.pod(uid)
	shared := t.TempDir()
	for _, v := range volumes {
		id := b.run(again, "again-"+v.FS, at(v), cri.Mount{Host: shared, Container: "/shared"})
		got := b.exec(id, "sha256sum </data/blob")
		check.That(t, got == sums[v.FS], "the next sandbox reads %q in %s", got, v.FS)
		_, err := b.CRI.Exec(b.ctx(), id, "echo x > /data/new")
		check.That(t, v.ReadOnly == (err != nil && strings.Contains(err.Error(), "Read-only")),
			"of a volume that is read-only: %t, a write ended with: %v", v.ReadOnly, err)
		v.wantStats(id)
		b.seesChanges(id, shared)
	}
	b.remove(again)
	for _, v := range volumes {
		v.giveBack()
	}
	b.WantClean(t)
}

// inUse has two containers share the volume, grows it under a writer, and gives the checksum of the file "blob".
func (v *volume) inUse(pod *cri.Pod) (sum string) {
	b := v.b
	first := b.run(pod, "first-"+v.FS, at(v))
	kernel := b.exec(first, "cat /proc/sys/kernel/osrelease; grep ' /data ' /proc/mounts")
	check.That(b.t, strings.Contains(kernel, "-cloud-") && strings.Contains(kernel, " "+v.FS+" "), "the container sees %q", kernel)
	sum = b.exec(first, "dd if=/dev/urandom of=/data/blob bs=64k count=64 2>/dev/null && sync && sha256sum </data/blob")
	v.wantStats(first)
	b.exec(first, "echo written >/data/unsynced")
	snapshots.WantClean(b.t, v.Volume, b.Driver.Data)
	second := b.run(pod, "second-"+v.FS, at(v), cri.Mount{Host: v.Target, Container: "/read", ReadOnly: true})
	check.Equal(b.t, b.exec(second, "sha256sum </data/blob"), sum, "the second container reads")
	_, err := b.CRI.Exec(b.ctx(), second, "echo x > /read/new")
	check.That(b.t, err != nil && strings.Contains(err.Error(), "Read-only"), "a write into the mount that is read-only: %v", err)
	b.exec(first, cri.Writer)
	check.Must(b.t, v.Grow(2*diskSize))
	b.exec(first, cri.Progress)
	b.exec(first, "touch /tmp/end; while [ -e /tmp/end ]; do sleep 0.1; done")
	total := v.wantStats(second)
	check.That(b.t, total >= 2*diskSize*8/10, "the filesystem has %d bytes after it was grown", total)
	v.publish() // kubelet was restarted
	return sum
}

// wantOneOwner: a second pod is refused before it has a machine, and the volume stays the first one's.
func (v *volume) wantOneOwner(other string) {
	v.b.t.Helper()
	machines, owner := len(v.b.Machines()), v.Pod
	v.For(other)
	check.Code(v.b.t, v.TryPublish(), codes.FailedPrecondition, owner)
	v.For(owner)
	check.Equal(v.b.t, len(v.b.Machines()), machines, "machines")
	check.Code(v.b.t, v.TryUnpublish(), codes.Aborted)
}

// wantUnplugged removes the pod. Its guest gives the disks back before the machine ends, and
// so has unmounted them by then.
func (b *bench) wantUnplugged(pod *cri.Pod, volumes []*volume) {
	b.t.Helper()
	qemu := check.Value(b.Machine(b.ctx(), pod))(b.t)
	has := func(v *volume) bool { return machine{qemu: qemu}.hasOpen(v.device) }
	check.That(b.t, has(volumes[0]), "the machine does not have the disk")
	removed := check.Begin(func() error { return pod.Remove(b.ctx()) })
	check.Eventually(b.t, "the machine runs on without its disks", func() bool {
		return !slices.ContainsFunc(volumes, has) && slices.Contains(b.Machines(), qemu)
	})
	check.Must(b.t, <-removed)
	group := b.CRI.Group + "/pod" + pod.UID
	check.Eventually(b.t, "no control group is left", func() bool { return len(rig.GroupDirs(group)) == 0 })
}

// seesChanges wants a container to see what the host changes in an ordinary mount: in a file
// as it is, as in that of a projected volume, by another link, and by another file.
func (b *bench) seesChanges(container, shared string) {
	b.t.Helper()
	for _, content := range []string{"one", "two"} {
		check.Must(b.t, os.WriteFile(shared+"/file", []byte(content), 0o600))
		check.Must(b.t, os.WriteFile(shared+"/"+content, []byte(content), 0o600))
		check.Must(b.t, os.Symlink(content, shared+"/new"))
		check.Must(b.t, os.Rename(shared+"/new", shared+"/link"))
		check.Eventually(b.t, "the container sees what the host has changed", func() bool {
			got, err := b.CRI.Exec(b.ctx(), container, "cd /shared && cat file link "+content)
			return err == nil && got == content+content+content
		})
	}
}

// wantGroups: the machine counts as its pod's, as kubelet's limits and figures want it. What
// runs out of memory in the guest has done so for containerd.
func (b *bench) wantGroups(pod *cri.Pod, container string) {
	b.t.Helper()
	groups := b.CRI.Group + "/pod" + pod.UID + "/"
	supervisor := check.Value(pod.Pid(b.ctx()))(b.t)
	nodes := check.Value(os.Readlink("/proc/self/ns/net"))(b.t)
	for _, pid := range append(rig.Children(supervisor), supervisor) {
		b.wantGroup(pid, groups+pod.ID)
		net, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
		check.That(b.t, pid == supervisor || err == nil && net != nodes, "process %d of the machine has the node's network: %s, %v", pid, net, err)
	}
	proxy := check.Value(b.CRI.Pid(b.ctx(), container))(b.t)
	b.wantGroup(proxy, groups+container)
	used := b.memory(groups + pod.ID)
	check.That(b.t, used >= 100*mib, "the pod's machine has %d bytes", used)
	for name, limit := range map[string]int64{"limited": 32 * mib, "unlimited": 0} { // by the machine's memory alone
		hungry := check.Value(pod.Run(b.ctx(), cri.Container{Name: name, Memory: limit, Script: "exec tail /dev/zero"}))(b.t)
		check.Eventually(b.t, "containerd reports that the container "+name+" ran out of memory", func() bool {
			reply, err := b.CRI.CRI.ContainerStatus(b.ctx(), &runtimeapi.ContainerStatusRequest{ContainerId: hungry})
			return err == nil && reply.GetStatus().GetExitCode() == 137 && reply.GetStatus().GetReason() == "OOMKilled"
		})
		b.exec(container, "true")
	}
}

// wantTerminal: what a container with a terminal writes is in its log.
func (b *bench) wantTerminal(pod *cri.Pod) {
	b.t.Helper()
	check.Value(pod.Run(b.ctx(), cri.Container{Name: "terminal", TTY: true, Script: "tty && echo it has said this"}))(b.t)
	var log []byte
	check.Succeeds(b.t, "the terminal's output is in the log", func() (err error) {
		if log, err = os.ReadFile(filepath.Join(b.CRI.Dir, "pod-logs", pod.UID, "terminal_0.log")); err == nil && !bytes.Contains(log, []byte("it has said this")) {
			err = fmt.Errorf("it is %q", log)
		}
		return err
	})
	check.Says(b.t, "the log", string(log), "/dev/pts/0")
}

// wantGroup wants a process to be in a control group of each hierarchy.
func (b *bench) wantGroup(pid int, group string) {
	b.t.Helper()
	raw := check.Value(os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cgroup")))(b.t)
	for line := range strings.Lines(string(raw)) {
		check.That(b.t, strings.HasSuffix(strings.TrimSpace(line), ":"+group), "%s is in %q and not in %s", rig.DescribeProcess(pid), line, group)
	}
}

// memory is what a control group uses.
func (b *bench) memory(group string) (bytes int64) {
	b.t.Helper()
	for _, dir := range rig.GroupDirs(group) {
		for _, file := range []string{"/memory.usage_in_bytes", "/memory.current"} {
			if raw, err := os.ReadFile(dir + file); err == nil {
				bytes += check.Value(strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64))(b.t)
			}
		}
	}
	return bytes
}
