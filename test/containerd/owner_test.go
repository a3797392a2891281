//go:build system

package containerd

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// Pods start, end and start again while the daemon is away: all that they need is
// on the node. It learns of them when it is back.
func TestPodsNeedNoDaemon(t *testing.T) {
	r := layOut(t)
	r.d.Extra = "reconcileInterval: 1s"
	r.d.Start()
	v := r.staged("pod-1", "xfs")
	r.d.Kill()
	first := r.pod("pod-1")
	sum := r.write(r.run(first, "main", at(v.target)), "/data/blob")
	r.remove(first)
	second := r.attempt("pod-1", 1)
	id := r.run(second, "main", at(v.target))
	got := r.exec(id, "sha256sum /data/blob")
	check.That(t, strings.HasPrefix(got, sum), "it reads %q", got)
	r.d.Start()
	v.wantStats(id)
	check.Eventually(t, "only the living sandbox is on record", func() bool { return slices.Equal(v.recorded(), []string{second.ID}) })
	r.d.Kill()
	r.remove(second)
	r.d.Start()
	v.unstage()
	v.check()
	r.wantClean()
}

// recorded lists the sandboxes that the volume's directory names.
func (v *volume) recorded() []string {
	found, _ := filepath.Glob(filepath.Join(abi.DefaultRoot, abi.DirName(v.target), "*"))
	var ids []string
	for _, path := range found {
		if name := filepath.Base(path); abi.IsSandboxID(name) {
			ids = append(ids, name)
		}
	}
	return ids
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
