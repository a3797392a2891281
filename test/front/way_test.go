//go:build system

package front

import (
	"crypto/sha256"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

// TestWholeWay takes a volume through all that kubelet does with it, with a
// driver that knows nothing of deferral and with one that does.
func TestWholeWay(t *testing.T) {
	for name, args := range map[string][]string{"block": nil, "native": {"--defer"}} {
		for i, fs := range []string{"ext4", "xfs", "btrfs"} {
			if !rig.Soak() && (i == 1) != (name == "native") {
				continue
			}
			t.Run(name+" "+fs, func(t *testing.T) {
				t.Parallel()
				wholeWay(t, fs, args)
			})
		}
	}
}

func wholeWay(t *testing.T, fs string, args []string) {
	n := newNode(t, deferAll, args...)
	v := n.create("pv-1", fs, 400*mib)
	n.up(v, "pod-1")
	n.wantGuarded(v, "pod-1")
	check.Code(t, check.Err(n.stats(v, "pod-1")), codes.Unavailable)

	first := n.boot("sandbox-1", v, "pod-1")
	data := strings.Repeat("the data of the pod\n", 50_000)
	check.Must(t, os.WriteFile(first.Dir()+"/data", []byte(data), 0o600))
	n.wantStats(v, "pod-1", first)
	check.Code(t, n.unpublish(v, "pod-1"), codes.Aborted, "sandbox-1")
	check.Must(t, n.stage(v)) // kubelet was restarted
	check.Must(t, n.publish(v, "pod-1"))
	n.wantGuarded(v, "pod-1")
	n.end(first)
	check.Must(t, n.unpublish(v, "pod-1"))

	check.Must(t, n.publish(v, "pod-2"))
	second := n.boot("sandbox-2", v, "pod-2")
	got := check.Value(os.ReadFile(second.Dir() + "/data"))(t)
	check.That(t, sha256.Sum256(got) == sha256.Sum256([]byte(data)), "the second pod does not see what the first one wrote")
	n.end(second)
	n.down(v, "pod-2")
}

// wantGuarded asserts that the filesystem is mounted nowhere on the host, and that nobody can write to the target.
func (n *node) wantGuarded(v *volume, pod string) {
	n.t.Helper()
	guards := 0
	for _, m := range rig.Mounts(n.Dir) {
		switch {
		case m.Mountpoint == v.TargetOf(pod) && m.FSType == "tmpfs" && strings.HasPrefix(m.Source, "crust:"):
			guards++
		case m.FSType == "ext4" || m.FSType == "xfs" || m.FSType == "btrfs":
			n.t.Errorf("a filesystem is mounted on the host: %+v", m)
		}
	}
	check.That(n.t, guards == 1, "%d guards stand on the target", guards)
	check.Is(n.t, os.WriteFile(v.TargetOf(pod)+"/file", []byte("lost"), 0o600), unix.ENOSPC) // a write to the target
	_ = os.Remove(v.TargetOf(pod) + "/file")
}

// wantStats compares stats with what statfs says in the sandbox.
func (n *node) wantStats(v *volume, pod string, s *kata.Guest) {
	n.t.Helper()
	check.Succeeds(n.t, "stats of the sandbox", func() error { _, err := n.stats(v, pod); return err })
	reply := check.Value(n.stats(v, pod))(n.t)
	var st unix.Statfs_t
	check.Must(n.t, unix.Statfs(s.Dir(), &st))
	old := check.Value(kubelet.Condition(reply))(n.t)
	check.That(n.t, len(reply.GetUsage()) != 0 && reply.GetUsage()[0].GetTotal() == int64(st.Blocks)*st.Bsize && old != nil && !old.GetAbnormal(),
		"stats: %v; statfs: %+v", reply, st)
}
