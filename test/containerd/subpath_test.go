//go:build system

package containerd

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// subPath makes a sub-directory in the target and binds it elsewhere, by
// descriptor, as kubelet does it. It gives what kubelet hands to CRI.
func (v *volume) subPath(container string, index int, path string) cri.Mount {
	t := v.r.t
	t.Helper()
	inTarget := filepath.Join(v.target, path)
	check.Must(t, os.MkdirAll(inTarget, 0o750))
	fd, err := unix.Open(inTarget, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	check.Must(t, err)
	defer func() { _ = unix.Close(fd) }()
	bound := fmt.Sprintf("%s/pods/%s/volume-subpaths/pv/%s/%d", v.r.d.Kubelet, v.pod, container, index)
	check.Must(t, os.MkdirAll(bound, 0o750))
	check.Must(t, unix.Mount(fmt.Sprintf("/proc/self/fd/%d", fd), bound, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(bound, unix.MNT_DETACH) })
	return cri.Mount{Host: bound, Container: "/data"}
}

// releaseSubPaths does what kubelet does before it unpublishes.
func (v *volume) releaseSubPaths() {
	t := v.r.t
	t.Helper()
	bound, err := filepath.Glob(v.r.d.Kubelet + "/pods/" + v.pod + "/volume-subpaths/pv/*/*")
	check.Must(t, err)
	for _, one := range bound {
		check.Must(t, unix.Unmount(one, 0))
	}
}

func TestSubPath(t *testing.T) {
	r := newTestNode(t)
	v := r.volume("pod-1", "ext4", diskSize)
	v.onHost(func(dir string) {
		check.Must(t, os.MkdirAll(dir+"/there/deep", 0o755))
		check.Must(t, os.WriteFile(dir+"/there/deep/file", []byte("deep"), 0o600))
	})
	v.stage()
	pod := r.pod("pod-1")
	deep := r.run(pod, "deep", v.subPath("deep", 0, "there/deep"))
	if got := r.exec(deep, "cat /data/file"); got != "deep" {
		t.Errorf("it reads %q", got)
	}
	fresh := r.run(pod, "fresh", v.subPath("fresh", 0, "made/by kubelet"))
	r.exec(fresh, "echo new > /data/file")
	if got := r.exec(fresh, "ls -A /data"); got != "file\n" {
		t.Errorf("a new sub-directory holds %q", got)
	}
	v.wantUnseen()
	whole := r.run(pod, "whole", at(v.target))
	if got := r.exec(whole, "cat '/data/made/by kubelet/file' /data/there/deep/file"); got != "new\ndeep" {
		t.Errorf("the whole volume holds %q", got)
	}
	if got := r.exec(deep, "ls -A /data/.."); strings.Contains(got, "there") {
		t.Errorf("the sub-directory shows what is above it: %q", got)
	}
	v.wantStats(deep)
	r.remove(pod)
	v.releaseSubPaths()
	v.unstage()
	v.check()
	r.wantClean()
}

// One container has a sub-directory read-only, and another one twice.
func TestSubPathsOfOneContainer(t *testing.T) {
	r := newTestNode(t)
	v := r.staged("pod-1", "xfs")
	pod := r.pod("pod-1")
	one, two, three := v.subPath("main", 0, "a"), v.subPath("main", 1, "b"), v.subPath("main", 2, "a")
	two.Container, three.Container, three.ReadOnly = "/two", "/three", true
	id := r.run(pod, "main", one, two, three)
	r.exec(id, "echo a > /data/file && echo b > /two/file")
	if got := r.exec(id, "cat /three/file /two/file"); got != "a\nb\n" {
		t.Errorf("they hold %q", got)
	}
	if _, err := r.node.Exec(r.ctx(), id, "echo x > /three/file"); err == nil {
		t.Error("a read-only sub-directory was written to")
	}
	r.remove(pod)
	v.releaseSubPaths()
	v.unstage()
	v.onHost(func(dir string) {
		raw, err := os.ReadFile(dir + "/b/file")
		if err != nil || string(raw) != "b\n" {
			t.Errorf("%q, %v", raw, err)
		}
	})
}

// A volume whose content was made to lead out of it: kubelet sees only the guard,
// so what follows the link would be the runtime handler.
func TestSubPathThatLeadsOut(t *testing.T) {
	r := newTestNode(t)
	for name, link := range map[string]string{"absolute": "/etc", "relative": "../../../../../../../../etc", "inside": "a/link"} {
		v := r.volume("pod-"+name, "ext4", diskSize)
		v.onHost(func(dir string) {
			check.Must(t, os.Mkdir(dir+"/a", 0o755))
			check.Must(t, os.Symlink("/", dir+"/a/link"))
			check.Must(t, os.Symlink(link, dir+"/sub"))
		})
		v.stage()
		pod := r.pod(v.pod)
		id, err := pod.Run(r.ctx(), cri.Container{Name: "main", Mounts: []cri.Mount{v.subPath("main", 0, "sub")}})
		if err == nil {
			t.Errorf("%s: a link in the volume was followed: %q", name, r.exec(id, "ls -A /data"))
		}
		r.remove(pod)
		v.releaseSubPaths()
		v.unstage()
	}
}

// A container of the pod swaps the sub-directory for a link that leads out, all
// the time, while others are started on it.
func TestSubPathRace(t *testing.T) {
	r := newTestNode(t)
	v := r.volume("pod-1", "ext4", diskSize)
	v.onHost(func(dir string) {
		check.Must(t, os.MkdirAll(dir+"/sub", 0o755))
		check.Must(t, os.WriteFile(dir+"/sub/marker", nil, 0o600))
		check.Must(t, os.Symlink("/", dir+"/evil"))
	})
	v.stage()
	pod := r.pod("pod-1")
	pid, err := r.node.Pid(r.ctx(), r.run(pod, "evil", at(v.target)))
	check.Must(t, err)
	end := swap(t, fmt.Sprintf("/proc/%d/root/data", pid))
	t.Cleanup(end)
	mount := v.subPath("good", 0, "sub")
	var started, refused int
	for i := range 10 {
		id, err := pod.Run(r.ctx(), cri.Container{Name: fmt.Sprintf("good-%d", i), Mounts: []cri.Mount{mount}})
		if err != nil {
			refused++
			continue
		}
		started++
		if got := r.exec(id, "ls -A /data"); got != "marker\n" {
			t.Errorf("a container got another directory: %q", got)
		}
	}
	end()
	t.Logf("%d containers started, %d were refused", started, refused)
	r.remove(pod)
	v.releaseSubPaths()
	v.unstage()
	v.check()
	r.wantClean()
}

// swap exchanges sub and evil until its end.
func swap(t *testing.T, dir string) (end func()) {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	check.Must(t, err)
	stop := make(chan struct{})
	var swapping sync.WaitGroup
	swapping.Go(func() {
		defer func() { _ = unix.Close(fd) }()
		for {
			select {
			case <-stop:
				return
			default:
			}
			if err := unix.Renameat2(fd, "sub", fd, "evil", unix.RENAME_EXCHANGE); err != nil {
				t.Error(err)
				return
			}
		}
	})
	return sync.OnceFunc(func() {
		close(stop)
		swapping.Wait()
	})
}
