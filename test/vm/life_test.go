//go:build system

package vm

import (
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// TestLifeOfAVolume takes volumes of a CSI driver through everything that kubelet does
// with them, and never is one mounted on the host.
func TestLifeOfAVolume(t *testing.T) {
	b := newBench(t)
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) { b.of(t).life(fs) })
	}
	b.WantClean(t)
}

func (b *bench) life(fs string) {
	v := b.volume("pv-"+fs, fs)
	pod := b.pod(v.Pod)
	first := b.run(pod, "first", at(v))
	kernel := b.exec(first, "cat /proc/sys/kernel/osrelease; grep ' /data ' /proc/mounts")
	if !strings.Contains(kernel, "-cloud-") || !strings.Contains(kernel, " "+fs+" ") {
		b.t.Errorf("the container sees %q", kernel)
	}
	sum := b.exec(first, "dd if=/dev/urandom of=/data/blob bs=64k count=64 2>/dev/null && sync && sha256sum </data/blob")
	v.wantStats(first)
	second := b.run(pod, "second", at(v), cri.Mount{Host: v.Target, Container: "/read", ReadOnly: true})
	if got := b.exec(second, "sha256sum </data/blob"); got != sum {
		b.t.Errorf("the second container reads %q", got)
	}
	if _, err := b.CRI.Exec(b.ctx(), second, "echo x > /read/new"); err == nil || !strings.Contains(err.Error(), "Read-only") {
		b.t.Errorf("a write into the mount that is read-only: %v", err)
	}
	check.Must(b.t, v.Grow(2*diskSize))
	if total := v.wantStats(second); total < 2*diskSize*8/10 {
		b.t.Errorf("the filesystem has %d bytes after it was grown", total)
	}
	v.publish() // kubelet was restarted
	b.remove(pod)
	v.unmounted(func(dir string) { b.wantSum(dir+"/blob", sum) })
	v.checkDisk()
	v.publish()
	again := b.pod(v.Pod)
	if got := b.exec(b.run(again, "again", at(v)), "sha256sum </data/blob"); got != sum {
		b.t.Errorf("the next sandbox reads %q", got)
	}
	b.remove(again)
	v.giveBack()
}
