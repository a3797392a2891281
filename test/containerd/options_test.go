//go:build system

package containerd

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// TestMountOptionsOfSandboxes tries on the kernel what mount options and superblocks ask for.
func TestMountOptionsOfSandboxes(t *testing.T) {
	r := newTestNode(t)
	t.Run("of mount(8)", func(t *testing.T) { r.of(t).optionsOfMount8() })
	t.Run("panic", func(t *testing.T) { r.of(t).noPanic() })
	t.Run("propagation", func(t *testing.T) { r.of(t).propagation() })
	t.Run("clone", func(t *testing.T) { r.of(t).cloneBesideItsOriginal() })
	r.wantClean()
}

// optionsOfMount8 has what a StorageClass for the host's mount command says.
func (r *testNode) optionsOfMount8() {
	r.t.Helper()
	v := r.volume("pod-1", "ext4", diskSize)
	v.flags = []string{"_netdev,nofail,noatime", "x-systemd.automount", "users", "comment=of the StorageClass"}
	v.stage()
	pod := r.pod(v.pod)
	for _, readOnly := range []bool{false, true} {
		mount := at(v.target)
		mount.ReadOnly = readOnly
		mounted := r.exec(r.run(pod, fmt.Sprint("main-", readOnly), mount), "grep ' /data ' /proc/mounts")
		check.Says(r.t, "the mount", mounted, "noatime", "nosuid", "nodev", "noexec")
	}
	r.remove(pod)
	v.unstage()
}

// noPanic has a superblock that asks the kernel to panic at the first error.
func (r *testNode) noPanic() {
	r.t.Helper()
	v := r.volume("pod-1", "ext4", diskSize)
	rig.Command(r.t, "tune2fs", "-e", "panic", v.disk)
	v.stage()
	pod := r.pod(v.pod)
	id := r.run(pod, "main", at(v.target))
	check.Says(r.t, "/proc/mounts", r.exec(id, "grep ' /data ' /proc/mounts"), "errors=remount-ro")
	r.remove(pod)
	v.unstage()
}

// propagation has a container with a restricted volume see what the host mounts elsewhere
// later. The host sees nothing of the container's.
func (r *testNode) propagation() {
	r.t.Helper()
	v := r.volume("pod-1", "ext4", diskSize)
	v.flags = []string{"noexec"}
	v.stage()
	check.Must(r.t, unix.Mount("", "/run", "", unix.MS_SHARED, "")) // as on a node with systemd
	host := check.Value(os.MkdirTemp("/run", "follows"))(r.t)
	r.t.Cleanup(func() { check.Must(r.t, os.RemoveAll(host)) })
	check.Must(r.t, os.Mkdir(host+"/sub", 0o755))
	pod := r.pod(v.pod)
	id := r.run(pod, "main", at(v.target), cri.Mount{Host: host, Container: "/host", Follows: true})
	check.Must(r.t, unix.Mount("tmpfs", host+"/sub", "tmpfs", 0, ""))
	r.t.Cleanup(func() { check.Must(r.t, unix.Unmount(host+"/sub", unix.MNT_DETACH)) })
	check.Must(r.t, os.WriteFile(host+"/sub/later", nil, 0o644))
	check.NoError(r.t, check.Err(r.node.Exec(r.ctx(), id, "ls /host/sub/later")), "what the host mounted later cannot be seen")
	v.wantUnseen()
	r.remove(pod)
	v.unstage()
}

// severalDevices makes a btrfs of devices. The kernel remembers it by their numbers, also when they are another's.
func (r *testNode) severalDevices(devices ...string) {
	r.t.Helper()
	rig.Command(r.t, "mkfs.btrfs", append([]string{"-q", "-f"}, devices...)...)
	r.t.Cleanup(func() { rig.Command(r.t, "btrfs", "device", "scan", "--forget") })
}

// cloneBesideItsOriginal has two filesystems with one UUID, as a volume and its snapshot's have.
func (r *testNode) cloneBesideItsOriginal() {
	r.t.Helper()
	for _, fs := range []string{"xfs", "btrfs"} {
		original, clone := r.volume("pod-1", fs, diskSize), r.volume("pod-2", fs, diskSize)
		if fs == "btrfs" { // the kernel takes the clone's device for a part of this one
			r.severalDevices(clone.disk, rig.Loop(r.t, rig.Image(r.t, diskSize), loopdev.Options{}))
		}
		rig.Command(r.t, "cp", original.image, clone.disk)
		var pods []*cri.Pod
		for _, v := range []*volume{original, clone} {
			v.stage()
			pod := r.pod(v.pod)
			pods = append(pods, pod)
			id := r.run(pod, "main", at(v.target))
			r.exec(id, "echo "+v.pod+" > /data/file && sync")
			v.wantStats(id)
		}
		for i, v := range []*volume{original, clone} {
			r.remove(pods[i])
			v.unstage()
			v.check()
		}
	}
}

// crashed is a volume whose node went down while it was mounted.
func (r *testNode) crashed(pod, fs string) *volume {
	r.t.Helper()
	v := r.volume(pod, fs, diskSize)
	v.image = rig.Crashed(r.t, v.disk, v.image, fs, "kept")
	v.disk = rig.Loop(r.t, v.image, loopdev.Options{})
	return v
}

// A journal is not replayed where the volume is read-only, because that would write; the option that the error names
// mounts it without. Where it may be written to, the sandbox recovers it as a node would.
func TestVolumeOfANodeThatCrashed(t *testing.T) {
	r := newTestNode(t)
	for _, fs := range filesystems {
		v := r.crashed("pod-"+fs, fs)
		before := checksum(t, v.disk)
		v.flags = []string{"ro"}
		err := v.tryStage()
		check.That(t, err != nil && strings.Contains(err.Error(), "mountOptions: ["+mountopt.NoReplay(fs)+"]"), "%s: staged read-only: %v", fs, err)
		v.flags = append(v.flags, mountopt.NoReplay(fs))
		v.stage()
		reader := r.pod(v.pod)
		r.exec(r.run(reader, "reader", at(v.target)), "ls /data")
		r.remove(reader)
		v.unstage()
		check.That(t, checksum(t, v.disk) == before, "%s: the read-only volume has changed", fs)

		v.flags = nil
		v.stage()
		pod := r.pod(v.pod)
		id := r.run(pod, "main", at(v.target))
		check.Equal(t, r.exec(id, "cat /data/file"), "kept", "%s: it reads", fs)
		v.wantStats(id)
		r.remove(pod)
		v.unstage()
		v.check()
	}
	r.wantClean()
}
