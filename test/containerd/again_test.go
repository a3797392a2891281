//go:build system

package containerd

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
)

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

func (v *volume) wantUnavailable() {
	v.r.t.Helper()
	check.Eventually(v.r.t, "nothing answers for a dead sandbox", func() bool {
		_, err := v.stats()
		return status.Code(err) == codes.Unavailable
	})
}

// TestSandboxOfALivingPodIsMadeAgain has a sandbox die, and kubelet make a new one
// without any CSI call.
func TestSandboxOfALivingPodIsMadeAgain(t *testing.T) {
	r := newTestNode(t)
	v := r.staged("pod-1", "ext4")
	old := r.pod("pod-1")
	first := r.run(old, "main", at(v.target))
	sum := r.write(first, "/data/blob")
	v.wantStats(first)
	pause, err := old.Pid(t.Context())
	check.Must(t, err)
	check.Must(t, syscall.Kill(pause, syscall.SIGKILL))
	check.Must(t, old.Stop(r.ctx()))
	v.wantUnavailable()
	check.Eventually(t, "the dead sandbox is not on record", func() bool { return len(v.recorded()) == 0 })

	pod := r.attempt("pod-1", 1)
	second := r.run(pod, "main", at(v.target))
	if got := r.exec(second, "sha256sum /data/blob"); !strings.HasPrefix(got, sum) {
		t.Errorf("the new sandbox reads %q", got)
	}
	r.exec(second, "dd if=/dev/zero of=/data/more bs=64k count=100 2>/dev/null && sync")
	v.wantStats(second)
	// Kubelet removes the old sandbox later; that must not touch the new one.
	r.remove(old)
	v.wantStats(second)
	if ids := v.recorded(); len(ids) != 1 || ids[0] != pod.ID {
		t.Errorf("on record are %q, and the sandbox is %s", ids, pod.ID)
	}
	r.d.Kill()
	r.d.Start()
	v.wantStats(second)
	r.remove(pod)
	v.unstage()
	v.check()
	r.wantClean()
}
