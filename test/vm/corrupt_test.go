//go:build system

package vm

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
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
	device := check.Value(os.OpenFile(v.device, os.O_WRONLY, 0))(v.b.t)
	check.Must(v.b.t, check.Err(device.WriteAt(make([]byte, to-from), from)))
	check.Must(v.b.t, device.Sync())
	check.Must(v.b.t, device.Close())
}

// damagedVolumes are one of each filesystem. Each has its superblock as it was: the rest is what a kernel has to parse.
func (b *bench) damagedVolumes(pod string) (all []*volume) {
	b.t.Helper()
	parts := map[string][2]int64{
		"ext4":  {4096, 8192},          // the descriptors of the groups
		"xfs":   {512, 2048},           // the headers of the first group
		"btrfs": {1 * mib, 64*mib - 1}, // the trees
	}
	for _, fs := range filesystems {
		v := b.volumeOf(pod, "pv-damaged-"+fs, fs)
		v.damage(parts[fs][0], parts[fs][1])
		all = append(all, v)
	}
	return all
}

// wantUnmountable: a guest that cannot mount a volume says so, with the volume's name.
func (v *volume) wantUnmountable(pod *cri.Pod) {
	v.b.t.Helper()
	_, err := pod.Run(v.b.ctx(), cri.Container{Name: "damaged-" + v.FS, Mounts: []cri.Mount{at(v)}})
	check.That(v.b.t, err != nil && strings.Contains(err.Error(), v.Target) && strings.Contains(err.Error(), "the guest: "), "the container: %v", err)
	v.b.t.Logf("the pod's error: %v", err)
	reply, err := v.Stats()
	check.That(v.b.t, err != nil || len(reply.GetUsage()) == 0, "nobody has it mounted, and its use is %v", reply.GetUsage())
}

// latent is damage that a kernel finds when a pod uses the filesystem, not when it mounts it.
type latent struct {
	fs       string
	prepare  string // in a container, before the damage
	damage   func(v *volume)
	use      string // in a container, which fails
	status   csi.VolumeHealthErrorType
	repair   []string // exits with an error, although it has succeeded, if it says repaired
	repaired string
}

var latents = map[string]latent{
	"ext4": damagedDirectory("remount-ro"),
	// The machine would end if its kernel mounted the filesystem without another behaviour.
	"panic": damagedDirectory("panic"),
	"xfs": {
		fs: "xfs", prepare: "touch /data/bad", damage: (*volume).damageUnlinkedLists, use: "rm /data/bad; sync; ls /data",
		status: csi.VolumeHealthErrorType_INACCESSIBLE, repair: []string{"xfs_repair", "-L"},
	},
	"btrfs": {
		fs: "btrfs", prepare: "yes damage | head -c 100000 >/data/bad", damage: (*volume).damageData, use: "cat /data/bad >/dev/null",
		status: csi.VolumeHealthErrorType_DEGRADED, repair: []string{"btrfs", "check", "--readonly"},
	},
}

// damagedDirectory is an ext4 with a directory without an inode. behaviour is what its
// superblock wants a kernel to do about errors.
func damagedDirectory(behaviour string) latent {
	return latent{
		fs: "ext4", prepare: "mkdir /data/bad",
		damage: func(v *volume) {
			rig.Command(v.b.t, "tune2fs", "-e", behaviour, v.device)
			rig.Command(v.b.t, "debugfs", "-w", "-R", "clri /bad", v.device)
		},
		use: "ls -la /data/bad/ && cat /data/bad/file", status: csi.VolumeHealthErrorType_DEGRADED,
		repair: []string{"e2fsck", "-fy"}, repaired: "FILE SYSTEM WAS MODIFIED",
	}
}

// damageUnlinkedLists puts an inode that does not exist into the lists of deleted inodes of an
// xfs, which its kernel follows when the next file is deleted.
func (v *volume) damageUnlinkedLists() {
	const noInode = 4096
	args := []string{"-x"}
	for group := range 4 {
		args = append(args, "-c", fmt.Sprintf("agi %d", group))
		for list := range 64 {
			args = append(args, "-c", fmt.Sprintf("write -d unlinked[%d] %d", list, noInode))
		}
	}
	rig.Command(v.b.t, "xfs_db", append(args, v.device)...)
}

// damageData overwrites data of the file "bad", whose checksum then is wrong.
func (v *volume) damageData() {
	v.b.t.Helper()
	pattern := []byte(strings.Repeat("damage\n", 1000))
	at := int64(bytes.Index(check.Value(os.ReadFile(v.device))(v.b.t), pattern))
	check.Require(v.b.t, at >= 0, "the data is not on the device")
	v.damage(at, at+100)
}

// TestDamageThatIsFoundLater: the pod has an error, also if the filesystem asks for a panic. Stats and health report
// the damage, the host goes on, and the volumes can be repaired and used.
func TestDamageThatIsFoundLater(t *testing.T) {
	pool := rig.Pool(t, "xfs", rig.Disk(t, 512*mib, "xfs"))
	b := newBench(t, "--data-dir", pool)
	b.Driver.Data = pool
	const uid = "pod-latent"
	full := b.volumeOf(uid, "pv-full", "ext4")
	volumes := make(map[string]*volume)
	for name, l := range latents {
		volumes[name] = b.volumeOf(uid, "pv-"+name, l.fs)
	}
	pod := b.pod(uid)
	for name, v := range volumes {
		b.exec(b.run(pod, name, at(v)), latents[name].prepare+" && echo kept >/data/good && sync")
	}
	b.remove(pod)
	for name, v := range volumes {
		v.Unpublish()
		latents[name].damage(v)
	}
	pod = b.published(uid, volumes)
	for name, v := range volumes {
		out, err := b.CRI.Exec(b.ctx(), b.run(pod, name, at(v)), latents[name].use)
		check.That(t, err != nil, "%s: the use of what is damaged: %q", name, out)
		v.wantAbnormal(latents[name].status)
	}
	full.wantNoSpace(pod)
	vmnode.End(b.ctx(), t, pod)
	check.Must(t, b.Mounts.CheckNone())
	for name, v := range volumes {
		v.Unpublish()
		latents[name].mend(v)
	}
	pod = b.published(uid, volumes)
	for name, v := range volumes {
		check.Equal(t, b.exec(b.run(pod, name, at(v)), "cat /data/good"), "kept\n", "%s: it reads", name)
	}
	b.remove(pod)
	for _, v := range volumes {
		v.giveBack()
	}
	full.giveBack()
	b.WantClean(t)
}

// wantNoSpace: where the storage of the volume's sparse image is full, the container has an error, and its machine runs on.
func (v *volume) wantNoSpace(pod *cri.Pod) {
	v.b.t.Helper()
	id, other := v.b.run(pod, "full", at(v)), v.b.Driver.Data+"/other"
	check.Is(v.b.t, os.WriteFile(other, make([]byte, 512*mib), 0o600), unix.ENOSPC)
	check.Fails(v.b.t, check.Err(v.b.CRI.Exec(v.b.ctx(), id, "dd if=/dev/zero of=/data/new bs=1M count=64 conv=fsync")), "Input/output error")
	check.Must(v.b.t, os.Remove(other))
}

// published publishes volumes again, and runs their pod.
func (b *bench) published(uid string, volumes map[string]*volume) *cri.Pod {
	b.t.Helper()
	for _, v := range volumes {
		v.publish()
	}
	return b.pod(uid)
}

// mend repairs a filesystem that nobody has.
func (l latent) mend(v *volume) {
	v.b.t.Helper()
	out, err := exec.Command(l.repair[0], append(l.repair[1:], v.device)...).CombinedOutput() //nolint:gosec // ours
	check.Require(v.b.t, err == nil || l.repaired != "" && strings.Contains(string(out), l.repaired), "%q: %v\n%s", l.repair, err, out)
}

// wantAbnormal waits until stats report that something is wrong, and wants health to have the status.
func (v *volume) wantAbnormal(status csi.VolumeHealthErrorType) {
	v.b.t.Helper()
	check.Eventually(v.b.t, "stats report the damage", func() bool {
		reply, err := v.Stats()
		if err != nil {
			return false
		}
		condition, err := kubelet.Condition(reply)
		return err == nil && condition.GetAbnormal()
	})
	health, err := v.Health()
	check.That(v.b.t, err == nil && len(health) == 1 && health[0].GetStatus() == status, "health is %v, %v", health, err)
}
