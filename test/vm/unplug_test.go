//go:build system

package vm

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestDisksAreUnplugged: at the end of a sandbox the guest gives its disks back before its
// machine ends, and so has unmounted them by then.
func TestDisksAreUnplugged(t *testing.T) {
	t.Setenv("CRUST_FAILPOINTS", "crust-vm-unplugged=sleep:2s")
	b := newBench(t)
	v := b.volume("pv", "ext4")
	pod := b.pod(v.Pod)
	b.run(pod, "init", at(v))
	b.run(pod, "main", at(v))
	qemu, err := b.Machine(b.ctx(), pod)
	check.Must(t, err)
	if n := opened(qemu, v.device); n < 1 {
		t.Fatalf("the machine has the disk %d times", n)
	}
	removed := make(chan error, 1)
	go func() { removed <- pod.Remove(b.ctx()) }()
	check.Eventually(t, "the machine runs on without its disk", func() bool { return opened(qemu, v.device) == 0 })
	check.Must(t, <-removed)
	v.checkDisk()
	v.giveBack()
	b.WantClean(t)
}

// opened counts how often a process has a file open; one that has ended has -1.
func opened(pid int, path string) (n int) {
	fds, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/fd")
	if err != nil || len(fds) == 0 {
		return -1
	}
	for _, fd := range fds {
		if to, _ := os.Readlink(filepath.Join("/proc", strconv.Itoa(pid), "fd", fd.Name())); to == path {
			n++
		}
	}
	return n
}
