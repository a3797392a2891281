//go:build system

package vm

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// TestRootFilesystemsWithoutVirtiofsd: where no virtiofsd is, each container has a copy of
// its root filesystem and of its ordinary mounts as a disk, as long as it is there.
func TestRootFilesystemsWithoutVirtiofsd(t *testing.T) {
	b, images := newBench(t), t.TempDir()
	b.Configure(t, map[string]any{"virtiofsd": "", "imageDir": images})
	v := b.volume("pv", "ext4")
	pod := b.pod(v.Pod)
	qemu, err := b.Machine(b.ctx(), pod)
	check.Must(t, err)

	shown := b.shownTo(pod)
	given := ordinary(t)
	mounts := []cri.Mount{
		at(v), {Host: given + "/dir", Container: "/dir", ReadOnly: true}, {Host: given + "/words", Container: "/words"},
	}
	init, err := pod.Run(b.ctx(), cri.Container{Name: "init", Mounts: mounts[:1], Script: "echo of init >/data/file && echo of init >/dev/shm/file"})
	check.Must(t, err)
	check.Eventually(t, "the image of a container that has ended is gone", func() bool {
		runs, err := b.CRI.Runs(b.ctx(), init)
		return err == nil && !runs && imagesOf(t, qemu, images) == 0
	})
	main := b.run(pod, "main", mounts...)
	b.seesCopies(main)
	if raw, err := os.ReadFile(given + "/words"); err != nil || string(raw) != "given\n" {
		t.Errorf("the file of the host has %q, %v", raw, err)
	}
	other := b.run(pod, "other", mounts[0])
	if got := b.exec(other, "cat /data/file /dev/shm/file; ls /own 2>&1 || true"); !strings.HasPrefix(got, "of init\nof main\n") || strings.Contains(got, "/own\n") {
		t.Errorf("the other container of the pod sees %q", got)
	}
	v.wantStats(other)
	if n := imagesOf(t, qemu, images); n != 2 {
		t.Errorf("the machine has %d images for two containers", n)
	}
	if _, err := pod.Run(b.ctx(), cri.Container{Name: "writer", Mounts: []cri.Mount{{Host: given + "/dir", Container: "/out"}}}); err == nil ||
		!strings.Contains(err.Error(), "its mount at /out is a directory of the node that it may write to") {
		t.Errorf("a container that is to write into a directory of the host: %v", err)
	}
	servers := rig.Processes(func(proc string) bool {
		command, _ := os.ReadFile(proc + "/cmdline") //nolint:gosec // a file of the kernel's
		return strings.Contains(string(command), b.State+"/"+pod.ID+"/shared")
	})
	if len(servers) > 0 {
		t.Errorf("processes that serve the guest: %v", servers)
	}
	for mount, options := range shown() {
		if !slices.Contains(strings.Split(options, ","), "nosymfollow") {
			t.Errorf("what is copied to %s can have links in it that are followed: %s", mount, options)
		}
	}
	b.remove(pod)
	v.checkDisk()
	v.giveBack()
	b.WantClean(t)
	if left, err := os.ReadDir(images); err != nil || len(left) > 0 {
		t.Errorf("images that are left: %v, %v", left, err)
	}
}

// shownTo watches what is mounted for a pod's guest from now on, and at the end gives the
// options by the mounts.
func (b *bench) shownTo(pod *cri.Pod) (end func() map[string]string) {
	b.t.Helper()
	top := b.State + "/" + pod.ID + "/shared"
	seen, stop, stopped := make(map[string]string), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			for _, m := range rig.Mounts(top) {
				if m.Mountpoint != top {
					seen[m.Mountpoint] = m.Options
				}
			}
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	return func() map[string]string {
		b.t.Helper()
		close(stop)
		<-stopped
		if len(seen) == 0 {
			b.t.Error("nothing was seen to be copied")
		}
		return seen
	}
}

// ordinary are a directory and a file of the host, as a pod has them besides volumes.
func ordinary(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	check.Must(t, os.Mkdir(dir+"/dir", 0o755)) //nolint:gosec // seen by the container
	for _, file := range []string{"/dir/config", "/words"} {
		check.Must(t, os.WriteFile(dir+file, []byte("given\n"), 0o600))
	}
	check.Must(t, os.Chown(dir+"/dir/config", 1234, 5678))
	check.Must(t, os.Chmod(dir+"/dir/config", 0o640|os.ModeSetgid))
	check.Must(t, os.Link(dir+"/dir/config", dir+"/dir/same"))
	check.Must(t, os.Symlink("config", dir+"/dir/link"))
	return dir
}

// seesCopies wants a container to see ordinary mounts as they are on the host, and to be
// able to write where it may.
func (b *bench) seesCopies(id string) {
	b.t.Helper()
	got := b.exec(id, `grep ' / ' /proc/mounts | cut -d' ' -f3
grep ' / ' /proc/mounts | grep -o nodev
stat -c '%u %g %a %h' /dir/config; readlink /dir/link; cat /dir/same
touch /dir/new 2>&1 | grep -o Read-only
echo own >/own && cat /own
echo last >/words && cat /words
echo of main >/dev/shm/file`)
	if want := "overlay\nnodev\n1234 5678 2640 2\nconfig\ngiven\nRead-only\nown\nlast\n"; got != want {
		b.t.Errorf("the container sees %q, not %q", got, want)
	}
}

// imagesOf counts the images that a machine has.
func imagesOf(t *testing.T, qemu int, dir string) int {
	t.Helper()
	fds, err := filepath.Glob("/proc/" + strconv.Itoa(qemu) + "/fd/*")
	check.Must(t, err)
	var images []string
	for _, fd := range fds {
		if to, _ := os.Readlink(fd); strings.HasPrefix(to, dir+"/") {
			images = append(images, to)
		}
	}
	slices.Sort(images)
	return len(slices.Compact(images))
}
