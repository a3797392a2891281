//go:build system

package containerd

import (
	"os"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/crinode"
)

// TestPodOnPlainRunc tells that the node is one: what other tests find wrong is
// not its fault then.
func TestPodOnPlainRunc(t *testing.T) {
	onEach(t, func(t *testing.T, version string) {
		node := newNode(t, version, nil)
		shared := node.Dir + "/shared"
		must(t, os.Mkdir(shared, 0o755))
		pod, err := node.RunPod(t.Context(), "pod-1", "", 0)
		must(t, err)
		id, err := pod.Run(t.Context(), crinode.Container{Name: "main", Mounts: []crinode.Mount{{Host: shared, Container: "/data"}}})
		must(t, err)
		_, err = node.Exec(t.Context(), id, "echo written > /data/file")
		must(t, err)
		got, err := node.Exec(t.Context(), id, "cat /data/file")
		must(t, err)
		raw, err := os.ReadFile(shared + "/file")
		must(t, err)
		if got != "written\n" || string(raw) != got {
			t.Errorf("the container reads %q, the node %q", got, raw)
		}
		must(t, pod.Remove(t.Context()))
	})
}
