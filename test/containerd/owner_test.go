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
	held := check.Value(unix.Open(v.disk, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0))(t)
	released := make(chan error, 1)
	go func() {
		err := check.Until(20*time.Second, 5*time.Millisecond, v.isTried)
		time.Sleep(100 * time.Millisecond) // in which it is refused a few times
		released <- errors.Join(err, unix.Close(held))
	}()
	id := r.run(pod, "main", at(v.target))
	check.Must(t, <-released)
	v.wantStats(id)
	r.remove(pod)
	v.unstage()
}

// isTried gives no error once crust-runc has the device open, which it does right before it
// claims it.
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
