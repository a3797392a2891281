//go:build system

package containerd

import (
	"fmt"
	"os"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// steps are the places in crust-runc at which it is killed, in their order.
var steps = []string{"crust-runc-mounted", "volume-attached", "volume-bound", "crust-runc-placed"}

// TestCrustRuncKilledAtEveryStep kills crust-runc while it sets up a container.
// The container does not start; kubelet's next attempt does.
func TestCrustRuncKilledAtEveryStep(t *testing.T) {
	r, where := newKilledNode(t)
	for i, step := range steps {
		t.Run(step, func(t *testing.T) {
			r := r.of(t)
			v := r.staged(fmt.Sprintf("pod-%d", i), filesystems[i%len(filesystems)])
			pod := r.pod(v.pod)
			check.Must(t, os.WriteFile(where, []byte(step), 0o600))
			_, err := pod.Run(r.ctx(), cri.Container{Name: "main", Mounts: []cri.Mount{at(v.target)}})
			check.Must(t, os.Remove(where))
			if err == nil {
				t.Fatalf("the container runs, and crust-runc was to die at %s", step)
			}
			v.wantUnseen()
			id, err := pod.Run(r.ctx(), cri.Container{Name: "main", Attempt: 1, Mounts: []cri.Mount{at(v.target)}})
			check.Must(t, err)
			sum := r.write(id, "/data/blob")
			v.wantStats(id)
			r.remove(pod)
			v.unstage()
			v.check()
			v.wantSum("blob", sum)
		})
	}
	r.wantClean()
}

// newKilledNode makes a node on which crust-runc dies at the failpoint that a file names,
// while the file is there.
func newKilledNode(t *testing.T) (r *testNode, where string) {
	t.Helper()
	where = t.TempDir() + "/where"
	return newWrappedNode(t, fmt.Sprintf("if [ -f %s ]; then CRUST_FAILPOINTS=$(cat %[1]s)=kill; export CRUST_FAILPOINTS; fi", where)), where
}
