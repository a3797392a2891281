//go:build system

package containerd

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/sandbox"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// ended are the sandboxes that were told to have gone.
type ended struct {
	mu  sync.Mutex
	ids []string
}

func (e *ended) note(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ids = append(e.ids, id)
}

func (e *ended) has(id string) func() bool {
	return func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return slices.Contains(e.ids, id)
	}
}

// follow follows a node until the test ends.
func follow(t testing.TB, node *cri.Node) (*sandbox.Tracker, *ended) {
	t.Helper()
	told := &ended{}
	tracker := sandbox.New(sandbox.Config{Runtime: "containerd", Socket: node.Socket, OnGone: told.note}, zap.NewNop())
	check.Running(t, tracker.Run)
	check.Eventually(t, "ready", tracker.Ready)
	return tracker, told
}

// copyOfRunc is an OCI runtime that is nobody else's.
func copyOfRunc(t *testing.T) string {
	t.Helper()
	path := check.Value(exec.LookPath("runc"))(t)
	raw := check.Value(os.ReadFile(path))(t)
	ours := filepath.Join(t.TempDir(), "crust-handler")
	check.Must(t, os.WriteFile(ours, raw, 0o700))
	return ours
}

// killPause kills the process that is a sandbox.
func killPause(t testing.TB, pod *cri.Pod) {
	t.Helper()
	check.Must(t, syscall.Kill(check.Value(pod.Pid(t.Context()))(t), syscall.SIGKILL))
}

// A pod through CRI: its sandbox, its handler, its containers, its end and the
// next sandbox, over a death of containerd.
func TestSandboxesAreFollowedOverCRI(t *testing.T) {
	node := newNode(t, map[string]string{"crust": copyOfRunc(t)})
	tracker, told := follow(t, node)
	is := func(uid string, want ...string) func() bool {
		return func() bool { return slices.Equal(tracker.OfPod(uid), want) }
	}
	first := check.Value(node.RunPod(t.Context(), "pod-1", "crust", 0))(t)
	plain := check.Value(node.RunPod(t.Context(), "pod-2", "", 0))(t)
	check.Eventually(t, "the first sandboxes", func() bool { return is("pod-1", first.ID)() && is("pod-2", plain.ID)() })
	uid, known := tracker.PodOf(first.ID)
	check.That(t, known && uid == "pod-1", "the first sandbox is of pod %q, %v", uid, known)

	killPause(t, first)
	check.Eventually(t, "the killed sandbox is gone", told.has(first.ID))
	second := check.Value(node.RunPod(t.Context(), "pod-1", "crust", 1))(t)
	check.Eventually(t, "the second sandbox", is("pod-1", second.ID))

	// Containerd dies; sandboxes do not, but for one that is killed meanwhile.
	victim := check.Value(plain.Pid(t.Context()))(t)
	node.Process.Kill()
	check.Eventually(t, "containerd is missed", func() bool { return !tracker.Ready() && tracker.LastError() != nil })
	check.That(t, is("pod-1", second.ID)() && is("pod-2", plain.ID)(), "sandboxes were forgotten with containerd")
	check.Must(t, syscall.Kill(victim, syscall.SIGKILL))
	check.Must(t, node.Process.Start())
	check.Eventually(t, "containerd is followed again", tracker.Ready)
	check.Eventually(t, "what ended meanwhile is gone", told.has(plain.ID))
	check.That(t, !told.has(second.ID)() && is("pod-1", second.ID)(), "a sandbox that lived on is gone")
	third := check.Value(node.RunPod(t.Context(), "pod-3", "crust", 0))(t)
	check.Eventually(t, "a sandbox of the new containerd", is("pod-3", third.ID))
	check.Must(t, third.Remove(t.Context()))
	check.Eventually(t, "the removed sandbox is gone", told.has(third.ID))
}

// The containers of a sandbox and where they have a volume, also below a kubelet directory that is a symbolic link.
func TestContainersOverCRI(t *testing.T) {
	node := newNode(t, nil)
	tracker, _ := follow(t, node)
	const below = "/pods/pod-1/volumes/kubernetes.io~csi/v/mount"
	target := node.Dir + "/real" + below
	check.Must(t, os.MkdirAll(target, 0o755))
	check.Must(t, os.Symlink("real", node.Dir+"/kubelet"))
	pod := check.Value(node.RunPod(t.Context(), "pod-1", "", 0))(t)
	other := check.Value(node.RunPod(t.Context(), "pod-2", "", 0))(t)
	linked := check.Value(pod.Run(t.Context(), cri.Container{
		Name: "linked", Mounts: []cri.Mount{{Host: node.Dir + "/kubelet" + below, Container: "/data"}}}))(t)
	direct := check.Value(pod.Run(t.Context(), cri.Container{
		Name: "direct", Mounts: []cri.Mount{{Host: target, Container: "/copy"}, {Host: node.Dir, Container: "/tmp"}}}))(t)
	check.Must(t, check.Err(other.Run(t.Context(), cri.Container{Name: "other", Mounts: []cri.Mount{{Host: target, Container: "/stolen"}}})))
	check.Eventually(t, "the sandbox", func() bool { return len(tracker.OfPod("pod-1")) == 1 })
	want := []string{pod.ID, linked, direct}
	slices.Sort(want)
	ids := check.Value(tracker.ContainerIDs(t.Context(), pod.ID))(t)
	slices.Sort(ids)
	check.That(t, slices.Equal(ids, want), "containers %q, want %q", ids, want)
	destinations := check.Value(tracker.Destinations(t.Context(), pod.ID, target))(t)
	slices.Sort(destinations)
	check.That(t, slices.Equal(destinations, []string{"/copy", "/data"}), "the volume is at %q", destinations)
}

// TestAHungShimStaysLiveAtListing: a shim that hangs is not a sandbox that went.
func TestAHungShimStaysLiveAtListing(t *testing.T) {
	node := newNode(t, nil)
	hung := check.Value(node.RunPod(t.Context(), "pod-1", "", 0))(t)
	killed := check.Value(node.RunPod(t.Context(), "pod-2", "", 0))(t)
	killPause(t, killed)
	shim := check.Value(hung.Shim(t.Context()))(t)
	check.Must(t, syscall.Kill(shim, syscall.SIGSTOP))
	defer func() { _ = syscall.Kill(shim, syscall.SIGCONT) }()
	tracker, _ := follow(t, node)
	got := tracker.OfPod("pod-1")
	check.That(t, slices.Equal(got, []string{hung.ID}), "the sandbox whose shim hangs: %q", got)
	check.Eventually(t, "the killed sandbox is not listed", func() bool { return len(tracker.OfPod("pod-2")) == 0 })
}
