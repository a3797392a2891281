//go:build system

package containerd

import (
	"os"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// TestPodOnPlainRunc tells that the node is one: what other tests find wrong is
// not its fault then.
func TestPodOnPlainRunc(t *testing.T) {
	node := newNode(t, nil)
	shared := node.Dir + "/shared"
	check.Must(t, os.Mkdir(shared, 0o755))
	pod, err := node.RunPod(t.Context(), "pod-1", "", 0)
	check.Must(t, err)
	id, err := pod.Run(t.Context(), cri.Container{Name: "main", Mounts: []cri.Mount{{Host: shared, Container: "/data"}}})
	check.Must(t, err)
	_, err = node.Exec(t.Context(), id, "echo written > /data/file")
	check.Must(t, err)
	got, err := node.Exec(t.Context(), id, "cat /data/file")
	check.Must(t, err)
	raw, err := os.ReadFile(shared + "/file")
	check.Must(t, err)
	if got != "written\n" || string(raw) != got {
		t.Errorf("the container reads %q, the node %q", got, raw)
	}
	check.Must(t, pod.Remove(t.Context()))
}
