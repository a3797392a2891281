//go:build system

package containerd

import (
	"errors"
	"os"
	"path/filepath"
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
	held := check.Value(unix.Open(v.disk, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0))(t)
	released := check.Begin(func() error {
		err := check.Until(20*time.Second, 5*time.Millisecond, v.isTried)
		time.Sleep(100 * time.Millisecond) // in which it is refused a few times
		return errors.Join(err, unix.Close(held))
	})
	id := r.run(pod, "main", at(v.target))
	check.Must(t, <-released)
	v.wantStats(id)
	r.remove(pod)
	v.unstage()
}

// isTried gives no error once crust-runc has the device open, which it does right before it claims it.
func (v *volume) isTried() error {
	names, err := filepath.Glob("/proc/[0-9]*/comm")
	for _, name := range names {
		if program, _ := os.ReadFile(name); string(program) != "crust-runc\n" { //nolint:gosec // a file of the kernel's
			continue
		}
		open, _ := filepath.Glob(filepath.Dir(name) + "/fd/*")
		for _, fd := range open {
			if device, _ := os.Readlink(fd); device == v.disk {
				return nil
			}
		}
	}
	return errors.Join(err, errors.New("no crust-runc has opened "+v.disk))
}
