//go:build system

package vm

import (
	"os"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// TestLifeOfAVolume takes volumes of a CSI driver through everything that kubelet does
// with them, and never is one mounted on the host.
func TestLifeOfAVolume(t *testing.T) {
	b := newBench(t)
	const uid = "pod-life"
	volumes := b.volumes(uid)
	pod := b.pod(uid)
	sums := make(map[string]string)
	for _, v := range volumes {
		sums[v.FS] = v.inUse(pod)
	}
	b.remove(pod)
	for _, v := range volumes {
		v.unmounted(func(dir string) { b.wantSum(dir+"/blob", sums[v.FS]) })
		v.checkDisk()
		v.publish()
	}
	again := b.pod(uid)
	shared := t.TempDir()
	for _, v := range volumes {
		id := b.run(again, "again-"+v.FS, at(v), cri.Mount{Host: shared, Container: "/shared"})
		if got := b.exec(id, "sha256sum </data/blob"); got != sums[v.FS] {
			t.Errorf("the next sandbox reads %q in %s", got, v.FS)
		}
		b.seesChanges(id, shared)
	}
	b.remove(again)
	for _, v := range volumes {
		v.giveBack()
	}
	b.WantClean(t)
}

// inUse has two containers share the volume, grows it, and gives the checksum of the
// file "blob".
func (v *volume) inUse(pod *cri.Pod) (sum string) {
	b := v.b
	first := b.run(pod, "first-"+v.FS, at(v))
	kernel := b.exec(first, "cat /proc/sys/kernel/osrelease; grep ' /data ' /proc/mounts")
	if !strings.Contains(kernel, "-cloud-") || !strings.Contains(kernel, " "+v.FS+" ") {
		b.t.Errorf("the container sees %q", kernel)
	}
	sum = b.exec(first, "dd if=/dev/urandom of=/data/blob bs=64k count=64 2>/dev/null && sync && sha256sum </data/blob")
	v.wantStats(first)
	second := b.run(pod, "second-"+v.FS, at(v), cri.Mount{Host: v.Target, Container: "/read", ReadOnly: true})
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
	return sum
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
