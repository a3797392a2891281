//go:build system

package containerd

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
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
