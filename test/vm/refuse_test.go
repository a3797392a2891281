//go:build system

package vm

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// TestASecondPodIsRefused before it has a machine: a volume that is written to has one
// owner. Nor does another pod get the volume by naming the first one's target, and its
// containers without the volume start.
func TestASecondPodIsRefused(t *testing.T) {
	b := newBench(t)
	v := b.volume("pv", "ext4")
	pod := b.pod(v.Pod)
	id := b.run(pod, "main", at(v))
	machines := len(b.Machines())
	mine, owner := v.Target, v.Pod
	v.For("pod-other")
	if err := v.TryPublish(); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), owner) {
		t.Errorf("a second pod: %v", err)
	}
	v.For(owner)
	if now := len(b.Machines()); now != machines {
		t.Errorf("there were %d machines, and are %d", machines, now)
	}
	other := b.pod("pod-other")
	_, err := other.Run(b.ctx(), cri.Container{Name: "thief", Mounts: []cri.Mount{{Host: mine, Container: "/data"}}})
	if err == nil || !strings.Contains(err.Error(), owner) {
		t.Errorf("another pod's container: %v", err)
	}
	b.exec(b.run(other, "plain"), "true")
	b.remove(other)
	v.wantStats(id)
	if err := v.TryUnpublish(); status.Code(err) != codes.Aborted {
		t.Errorf("unpublish below a running pod: %v", err)
	}
	b.remove(pod)
	v.giveBack()
	b.WantClean(t)
}

// TestReadOnlyVolume: the machine cannot write to the device, whatever its kernel does.
func TestReadOnlyVolume(t *testing.T) {
	b := newBench(t)
	v := b.volume("pv", "ext4")
	pod := b.pod(v.Pod)
	b.exec(b.run(pod, "writer", at(v)), "echo kept > /data/file && sync")
	b.remove(pod)
	v.Unpublish()
	v.ReadOnly = true
	v.publish()
	pod = b.pod(v.Pod)
	id := b.run(pod, "reader", at(v))
	if got := b.exec(id, "cat /data/file"); got != "kept\n" {
		t.Errorf("it reads %q", got)
	}
	if _, err := b.CRI.Exec(b.ctx(), id, "echo x > /data/new"); err == nil || !strings.Contains(err.Error(), "Read-only") {
		t.Errorf("a write ended with: %v", err)
	}
	v.wantStats(id)
	b.remove(pod)
	v.giveBack()
	b.WantClean(t)
}
