//go:build system

package containerd

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

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
