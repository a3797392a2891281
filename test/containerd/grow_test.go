//go:build system

package containerd

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

const grownSize = 2 * diskSize

// A volume that grows after crust-runc has mounted it, and before that has left word of
// the sandbox, is grown when the sandbox answers: kubelet was told that it is.
func TestGrownWhileItIsMounted(t *testing.T) {
	for _, fs := range []string{"xfs", "btrfs"} { // a mounted ext4 grows only with CAP_SYS_RESOURCE
		t.Run(fs, func(t *testing.T) { grownWhileItIsMounted(t, fs) })
	}
}

func grownWhileItIsMounted(t *testing.T, fs string) {
	r := newWrappedNode(t, "export CRUST_FAILPOINTS=volume-attached=sleep:3s")
	v := r.staged("pod-1", fs)
	pod, id := r.pod(v.pod), ""
	started := check.Begin(func() (err error) {
		id, err = pod.Run(r.ctx(), cri.Container{Name: "main", Mounts: []cri.Mount{at(v.target)}})
		return err
	})
	check.Eventually(t, "it is mounted in the sandbox", func() bool {
		tables, _ := filepath.Glob("/proc/[0-9]*/mountinfo")
		return slices.ContainsFunc(tables, func(table string) bool {
			raw, _ := os.ReadFile(table) //nolint:gosec // of a process, which may be gone
			return strings.Contains(string(raw), " "+v.disk+" ")
		})
	})
	rig.Enlarge(t, v.image, v.disk, grownSize)
	size, err := v.expand(grownSize)
	check.That(t, err == nil && size == grownSize, "%d, %v", size, err)
	check.Must(t, <-started)
	check.Eventually(t, "it has grown", func() bool {
		_, err := v.stats()
		return err == nil && r.df(id).bytesTotal >= grownSize*8/10
	})
	// The sandbox's answer ends the record. The superblock is on the disk half a minute later, or more.
	check.Must(t, check.Until(20*time.Second, 100*time.Millisecond, func() error {
		check.Must(t, check.Err(v.stats()))
		shown := check.Value(r.d.Admin().GetVolume(r.ctx(), &adminv1.GetVolumeRequest{Volume: v.target}))(t)
		if shown.GetVolume().GetGrowToBytes() != 0 {
			return errors.New("the growth is still on record")
		}
		return nil
	}))
	r.remove(pod)
	v.unstage()
	v.check()
	r.wantClean()
}
