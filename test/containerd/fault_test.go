//go:build system

package containerd

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// Kubelet starts containers one after the other; another user of CRI need not.
func TestContainersOfAPodStartAtOnce(t *testing.T) {
	r := newTestNode(t)
	for _, fs := range filesystems {
		v := r.staged("pod-"+fs, fs)
		pod := r.pod(v.pod)
		ids := make([]string, 5)
		var all errgroup.Group
		for i := range ids {
			all.Go(func() (err error) {
				ids[i], err = pod.Run(r.ctx(), cri.Container{Name: fmt.Sprintf("c%d", i), Mounts: []cri.Mount{at(v.target)}})
				return err
			})
		}
		check.Must(t, all.Wait())
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
	r := newTestNode(t)
	v := r.staged("pod-1", "ext4")
	pod := r.pod("pod-1")
	id := r.run(pod, "main", at(v.target))
	v.wantStats(id)
	trigger := "/sys/fs/ext4/" + filepath.Base(v.disk) + "/trigger_fs_error"
	if err := os.WriteFile(trigger, []byte("on purpose"), 0); err != nil {
		rig.Missing(t, err.Error())
	}
	reply, err := v.stats()
	check.Must(t, err)
	condition := reply.GetVolumeCondition()
	if !condition.GetAbnormal() || !strings.Contains(condition.GetMessage(), "error") || condition.GetReason() != abi.ReasonReadOnly {
		t.Errorf("the volume's condition is told as %v", condition)
	}
	r.remove(pod)
	v.unstage()
}

// An image file is no device that this node's kernel can mount: a clear error,
// and never a mount of something else.
func TestImageFileIsRefused(t *testing.T) {
	r := newTestNode(t)
	v := r.volume("pod-1", "ext4", 32*mib)
	v.disk = r.d.Images + "/image"
	raw, err := os.ReadFile(v.image)
	check.Must(t, err)
	check.Must(t, os.WriteFile(v.disk, raw, 0o600))
	if err := v.tryStage(); err != nil {
		if !strings.Contains(err.Error(), "image") {
			t.Errorf("staging it ended with: %v", err)
		}
		return
	}
	pod := r.pod("pod-1")
	_, err = pod.Run(r.ctx(), cri.Container{Name: "main", Mounts: []cri.Mount{at(v.target)}})
	if err == nil || !strings.Contains(err.Error(), "image") {
		t.Errorf("a container on it ended with: %v", err)
	}
	r.remove(pod)
	v.unstage()
}

// A device may be in use for a moment by an attempt that was killed, or by a sandbox that
// has just ended: the kernel unmounts later than they die.
func TestDeviceThatIsFreeSoon(t *testing.T) {
	r := newTestNode(t)
	v := r.staged("pod-1", "ext4")
	pod := r.pod("pod-1")
	held, err := unix.Open(v.disk, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	check.Must(t, err)
	released := make(chan error, 1)
	go func() {
		time.Sleep(time.Second) // a slower start finds it free at once
		released <- unix.Close(held)
	}()
	id := r.run(pod, "main", at(v.target))
	check.Must(t, <-released)
	v.wantStats(id)
	r.remove(pod)
	v.unstage()
}
