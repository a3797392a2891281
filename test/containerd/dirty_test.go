//go:build system

package containerd

import (
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// crashed is a volume whose node went down while it was mounted.
func (r *testNode) crashed(pod, fs string) *volume {
	r.t.Helper()
	v := r.volume(pod, fs, diskSize)
	v.image = rig.Crashed(r.t, v.disk, v.image, fs, "kept")
	v.disk = rig.Loop(r.t, v.image, loopdev.Options{})
	return v
}

// A journal is not replayed where the volume is read-only, because that would
// write; the option that the error names mounts it without. Where it may be written
// to, the sandbox recovers it as a node would.
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
		got := r.exec(id, "cat /data/file")
		check.That(t, got == "kept", "%s: it reads %q", fs, got)
		v.wantStats(id)
		r.remove(pod)
		v.unstage()
		v.check()
	}
	r.wantClean()
}
