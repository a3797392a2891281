//go:build system

package vm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
	"github.com/crust-proxy/crust-proxy/test/rig/vmnode"
)

// damage zeroes a part of the device.
func (v *volume) damage(from, to int64) {
	v.b.t.Helper()
	device, err := os.OpenFile(v.device, os.O_WRONLY, 0)
	check.Must(v.b.t, err)
	_, err = device.WriteAt(make([]byte, to-from), from)
	check.Must(v.b.t, err)
	check.Must(v.b.t, device.Sync())
	check.Must(v.b.t, device.Close())
}

// kernelLog is what this machine's kernel says from now on.
func kernelLog(t *testing.T) func() string {
	t.Helper()
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		rig.Missing(t, fmt.Sprintf("the kernel's log cannot be read: %v", err))
	}
	_, err = unix.Seek(fd, 0, unix.SEEK_END)
	check.Must(t, err)
	return func() string {
		defer func() { _ = unix.Close(fd) }()
		var said strings.Builder
		line := make([]byte, 8192)
		for {
			n, err := unix.Read(fd, line)
			switch {
			case errors.Is(err, unix.EAGAIN):
				return said.String()
			case errors.Is(err, unix.EPIPE): // others have said so much that some of it is gone
				continue
			}
			check.Must(t, err)
			said.Write(line[:n])
		}
	}
}

// wantUnseenByTheHost fails where this machine's kernel has had to do with the filesystem.
func (v *volume) wantUnseenByTheHost(log string) {
	v.b.t.Helper()
	check.Must(v.b.t, v.b.Mounts.CheckNone())
	name := filepath.Base(v.device)
	whole := regexp.MustCompile(`\b` + name + `\b`) // loop1 is not loop12, which another test has mounted
	for line := range strings.Lines(log) {
		if whole.MatchString(line) && strings.Contains(strings.ToLower(line), v.FS) {
			v.b.t.Errorf("the host's kernel says: %s", line)
		}
	}
	for _, dir := range []string{"/sys/fs/ext4/", "/sys/fs/xfs/"} {
		if _, err := os.Stat(dir + name); err == nil {
			v.b.t.Errorf("the host's kernel has %s%s", dir, name)
		}
	}
}

// TestDamagedFilesystems: a guest that cannot mount a volume says so, with the volume's
// name. The pod's other containers start, and the host's kernel never has a look.
func TestDamagedFilesystems(t *testing.T) {
	b := newBench(t)
	const uid = "pod-damaged"
	// Each leaves the superblock as it is: the rest is what a kernel has to parse.
	parts := map[string][2]int64{
		"ext4":  {4096, 8192},          // the descriptors of the groups
		"xfs":   {512, 2048},           // the headers of the first group
		"btrfs": {1 * mib, 64*mib - 1}, // the trees
	}
	volumes := b.volumes(uid)
	said := kernelLog(t)
	pod := b.pod(uid)
	for _, v := range volumes {
		v.damage(parts[v.FS][0], parts[v.FS][1])
		_, err := pod.Run(b.ctx(), cri.Container{Name: v.FS, Mounts: []cri.Mount{at(v)}})
		if err == nil || !strings.Contains(err.Error(), v.Target) || !strings.Contains(err.Error(), "the guest: ") {
			t.Errorf("the container: %v", err)
		}
		t.Logf("the pod's error: %v", err)
		if reply, err := v.Stats(); err == nil && len(reply.GetUsage()) > 0 {
			t.Errorf("nobody has it mounted, and its use is %v", reply.GetUsage())
		}
	}
	b.exec(b.run(pod, "plain"), "true")
	b.remove(pod)
	log := said()
	for _, v := range volumes {
		v.wantUnseenByTheHost(log)
		v.giveBack()
	}
	b.WantClean(t)
}

// TestDamageThatIsFoundLater, also in a filesystem that asks for a panic: the pod has an
// error, or the machine ends; the host goes on, and the volume can be mended and used.
func TestDamageThatIsFoundLater(t *testing.T) {
	b := newBench(t)
	for _, behaviour := range []string{"remount-ro", "panic"} {
		t.Run(behaviour, func(t *testing.T) { b.of(t).foundLater(behaviour) })
	}
	b.WantClean(t)
}

func (b *bench) foundLater(behaviour string) {
	v := b.volume("pv-"+behaviour, "ext4")
	pod := b.pod(v.Pod)
	b.exec(b.run(pod, "main", at(v)), "mkdir /data/bad && echo kept >/data/good && sync")
	b.remove(pod)
	v.Unpublish()
	for _, command := range [][]string{
		{"tune2fs", "-e", behaviour, v.device}, {"debugfs", "-w", "-R", "clri /bad", v.device},
	} {
		if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
			b.t.Fatalf("%q: %v\n%s", command, err, out)
		}
	}
	said := kernelLog(b.t)
	v.publish()
	pod = b.pod(v.Pod)
	id := b.run(pod, "main", at(v))
	if out, err := b.CRI.Exec(b.ctx(), id, "ls -la /data/bad/ && cat /data/bad/file"); err == nil {
		b.t.Errorf("the directory that is damaged: %q", out)
	}
	if _, err := b.Machine(b.ctx(), pod); err == nil { // the guest's kernel did not end
		check.Eventually(b.t, "stats tell of the damage", func() bool {
			reply, err := v.Stats()
			if err != nil {
				return false
			}
			condition, err := kubelet.Condition(reply)
			return err == nil && condition.GetAbnormal()
		})
		if health, err := v.Health(); err != nil || len(health) != 1 || health[0].GetStatus() != csi.VolumeHealthErrorType_DEGRADED {
			b.t.Errorf("health is %v, %v", health, err)
		}
	}
	vmnode.End(b.ctx(), b.t, pod)
	v.wantUnseenByTheHost(said())
	v.Unpublish()
	if out, err := exec.Command("e2fsck", "-fy", v.device).CombinedOutput(); err != nil && !strings.Contains(string(out), "FILE SYSTEM WAS MODIFIED") {
		b.t.Fatalf("e2fsck: %v\n%s", err, out)
	}
	v.publish()
	pod = b.pod(v.Pod)
	if got := b.exec(b.run(pod, "main", at(v)), "cat /data/good"); got != "kept\n" {
		b.t.Errorf("it reads %q", got)
	}
	b.remove(pod)
	v.giveBack()
}
