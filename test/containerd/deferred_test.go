//go:build system

package containerd

import (
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestOneVolumeTwoContainers goes the whole way with every filesystem.
func TestOneVolumeTwoContainers(t *testing.T) {
	r := newTestNode(t)
	for _, fs := range rig.Sample(filesystems, 2) {
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
