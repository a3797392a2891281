//go:build system

package containerd

import (
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// TestOneVolumeTwoContainers goes the whole way with every filesystem.
func TestOneVolumeTwoContainers(t *testing.T) {
	r := newTestNode(t)
	for _, fs := range filesystems {
		v := r.volume("pod-"+fs, fs, diskSize)
		unseen := v.watchHost()
		v.stage()
		pod := r.pod(v.pod)
		first := r.run(pod, "first", at(v.target))
		v.wantUnseen()
		sum := r.write(first, "/data/blob")
		v.wantStats(first)
		second := r.run(pod, "second", at(v.target))
		if got := r.exec(second, "sha256sum /data/blob"); !strings.HasPrefix(got, sum) {
			t.Errorf("%s: the second container reads %q", fs, got)
		}
		r.exec(second, "echo two > /data/two && sync")
		if got := r.exec(first, "cat /data/two"); got != "two\n" {
			t.Errorf("%s: the first container reads %q", fs, got)
		}
		v.wantStats(second)
		v.wantUnseen()
		r.remove(pod)
		v.unstage()
		unseen()
		v.check()
		v.wantSum("blob", sum)
	}
	r.wantClean()
}

// A pod mounts, beside its volume, directories of the node; these stay as they
// are.
func TestOtherMountsStay(t *testing.T) {
	r := newTestNode(t)
	plain := r.node.Dir + "/plain"
	check.Must(t, os.Mkdir(plain, 0o755))
	check.Must(t, os.WriteFile(plain+"/file", []byte("plain"), 0o600))
	v := r.staged("pod-1", "ext4")
	pod := r.pod("pod-1")
	with := r.run(pod, "with", at(v.target), cri.Mount{Host: plain, Container: "/plain"})
	without := r.run(pod, "without", cri.Mount{Host: plain, Container: "/plain"})
	for _, container := range []string{with, without} {
		if got := r.exec(container, "cat /plain/file"); got != "plain" {
			t.Errorf("it reads %q", got)
		}
	}
	if _, err := r.node.Exec(t.Context(), without, "ls /data"); err == nil {
		t.Error("a container without the volume has it")
	}
	r.remove(pod)
	v.unstage()
}

func TestReadOnly(t *testing.T) {
	r := newTestNode(t)
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) { r.of(t).readOnlyVolume(fs) })
	}
	t.Run("mount", func(t *testing.T) { r.of(t).readOnlyMount() })
	r.wantClean()
}

// of is the node in a subtest.
func (r *testNode) of(t *testing.T) *testNode {
	other := *r
	other.t = t
	return &other
}

func (r *testNode) readOnlyVolume(fs string) {
	r.t.Helper()
	v := r.volume("pod-"+fs, fs, diskSize)
	v.onHost(func(dir string) { check.Must(r.t, os.WriteFile(dir+"/file", []byte("kept"), 0o600)) })
	v.flags = []string{"ro"}
	before := checksum(r.t, v.disk)
	v.stage()
	pod := r.pod(v.pod)
	id := r.run(pod, "main", at(v.target))
	if got := r.exec(id, "cat /data/file"); got != "kept" {
		r.t.Errorf("it reads %q", got)
	}
	r.wantReadOnly(id)
	v.wantStats(id)
	r.remove(pod)
	v.unstage()
	if checksum(r.t, v.disk) != before {
		r.t.Error("the read-only volume has changed")
	}
}

func (r *testNode) wantReadOnly(container string) {
	r.t.Helper()
	_, err := r.node.Exec(r.ctx(), container, "echo x > /data/new")
	if err == nil || !strings.Contains(err.Error(), "Read-only file system") {
		r.t.Errorf("a write ended with: %v", err)
	}
}

// readOnlyMount has a volume that one container may only read.
func (r *testNode) readOnlyMount() {
	r.t.Helper()
	v := r.staged("pod-mount", "ext4")
	pod := r.pod(v.pod)
	reader := r.run(pod, "reader", cri.Mount{Host: v.target, Container: "/data", ReadOnly: true})
	r.wantReadOnly(reader)
	writer := r.run(pod, "writer", at(v.target))
	r.exec(writer, "echo x > /data/new")
	if got := r.exec(reader, "cat /data/new"); got != "x\n" {
		r.t.Errorf("it reads %q", got)
	}
	r.wantReadOnly(reader)
	r.remove(pod)
	v.unstage()
}

// A volume is mounted for the pod that it was published for, and no other one.
func TestAnotherPodIsRefused(t *testing.T) {
	r := newTestNode(t)
	v := r.staged("pod-1", "ext4")
	other := r.pod("pod-2")
	_, err := other.Run(r.ctx(), cri.Container{Name: "main", Mounts: []cri.Mount{at(v.target)}})
	if err == nil || !strings.Contains(err.Error(), "pod-1") {
		t.Errorf("another pod's container: %v", err)
	}
	check.Must(t, v.isFree())
	r.remove(other)
	_, err = v.stats()
	if status.Code(err) != codes.Unavailable {
		t.Errorf("stats: %v", err)
	}
	own := r.pod("pod-1")
	v.wantStats(r.run(own, "main", at(v.target)))
	r.remove(own)
	v.unstage()
}

func TestSymlinkedKubeletRoot(t *testing.T) {
	r := layOut(t)
	link := r.d.Dir + "/link"
	check.Must(t, os.Symlink(r.d.Kubelet, link))
	r.d.Kubelet = link
	r.d.Start()
	v := r.staged("pod-1", "ext4")
	pod := r.pod("pod-1")
	id := r.run(pod, "main", at(v.target))
	sum := r.write(id, "/data/blob")
	v.wantStats(id)
	r.remove(pod)
	v.unstage()
	v.wantSum("blob", sum)
}
