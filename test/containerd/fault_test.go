//go:build system

package containerd

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/crust-proxy/crust-proxy/test/crinode"
	"github.com/crust-proxy/crust-proxy/test/harness"
)

// Kubelet starts containers one after the other; another user of CRI need not.
func TestContainersOfAPodStartAtOnce(t *testing.T) {
	r := newRig(t, "installed")
	for _, fs := range filesystems {
		v := r.staged("pod-"+fs, fs)
		pod := r.pod(v.pod)
		ids := make([]string, 5)
		var all errgroup.Group
		for i := range ids {
			all.Go(func() (err error) {
				ids[i], err = pod.Run(r.ctx(), crinode.Container{Name: fmt.Sprintf("c%d", i), Mounts: []crinode.Mount{at(v.target)}})
				return err
			})
		}
		must(t, all.Wait())
		for i, id := range ids {
			r.exec(id, fmt.Sprintf("echo %d > /data/%d && sync", i, i))
		}
		if got := r.exec(ids[0], "cat /data/[0-9]"); got != "0\n1\n2\n3\n4\n" {
			t.Errorf("%s: the volume holds %q", fs, got)
		}
		v.wantStats(ids[4])
		r.remove(pod)
		v.unstage()
		v.check()
	}
}

// What the filesystem has found wrong with itself is told with its stats.
func TestErrorsOfTheFilesystemAreTold(t *testing.T) {
	r := newRig(t, "installed")
	v := r.staged("pod-1", "ext4")
	pod := r.pod("pod-1")
	id := r.run(pod, "main", at(v.target))
	v.wantStats(id)
	trigger := "/sys/fs/ext4/" + filepath.Base(v.disk) + "/trigger_fs_error"
	if err := os.WriteFile(trigger, []byte("on purpose"), 0); err != nil {
		harness.Missing(t, err.Error())
	}
	reply, err := v.stats()
	must(t, err)
	if condition := reply.GetVolumeCondition(); !condition.GetAbnormal() || !strings.Contains(condition.GetMessage(), "error") {
		t.Errorf("the volume's condition is told as %v", condition)
	}
	r.remove(pod)
	v.unstage()
}

// An image file is no device that this node's kernel can mount: a clear error,
// and never a mount of something else.
func TestImageFileIsRefused(t *testing.T) {
	r := newRig(t, "installed")
	v := r.volume("pod-1", "ext4", 32*mib)
	v.disk = r.d.Images + "/image"
	raw, err := os.ReadFile(v.image)
	must(t, err)
	must(t, os.WriteFile(v.disk, raw, 0o600))
	if err := v.tryStage(); err != nil {
		if !strings.Contains(err.Error(), "image") {
			t.Errorf("staging it ended with: %v", err)
		}
		return
	}
	pod := r.pod("pod-1")
	_, err = pod.Run(r.ctx(), crinode.Container{Name: "main", Mounts: []crinode.Mount{at(v.target)}})
	if err == nil || !strings.Contains(err.Error(), "image") {
		t.Errorf("a container on it ended with: %v", err)
	}
	r.remove(pod)
	v.unstage()
}
