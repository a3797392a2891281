package pods

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	corev1 "k8s.io/api/core/v1"

	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestAWatchThatBreaksIsTakenUpAgain(t *testing.T) {
	for name, streams := range map[string]bool{"lists": false, "streamed lists": true} {
		t.Run(name, func(t *testing.T) {
			f := newFakeAPI(t)
			f.streams = streams
			f.putBound("data")
			f.put(aPod("a", "data"), aPod("b"))
			c := start(t, f, patient)
			check.Value(c.ByUID(t.Context(), "uid-a"))(t)
			for i, pod := range numbered("new", 3) {
				f.cutWatches()
				if i == 2 { // what happened in between is not told any more
					f.remove(aPod("b"))
					f.forget()
				}
				f.put(aPod(pod))
				check.Value(c.ByUID(t.Context(), "uid-"+pod))(t)
			}
			eventually(t, c, "the removed pod is gone", func() bool { return c.State().Pods == 4 })
			listed := f.count("list pods")
			check.That(t, (listed == 0) == streams, "%d lists", listed)
		})
	}
}

func TestTheAPIServerIsAway(t *testing.T) {
	f := newFakeAPI(t)
	f.put(class("kata", "kata-qemu"), unbound("open"))
	f.putBound("data", "later")
	f.put(ofClass(aPod("a", "data"), "kata"), aPod("half", "data", "open"))
	c := startSynced(t, f, hasty)
	eventually(t, c, "all is learned that can be", func() bool {
		users, err := c.Using(t.Context(), driver, "vol-data")
		return err == nil && len(users) == 2 && c.State().Incomplete == 1
	})
	heard := c.State().LastHeard

	f.setAway(true)
	eventually(t, c, "that is noticed", func() bool { return len(c.State().Problems) == 3 })
	gets := f.count("get persistentvolumeclaimsdefault/open")
	for range 3 { // what is known is told
		p := check.Value(c.ByUID(t.Context(), "uid-a"))(t)
		check.That(t, p.RuntimeHandler == "kata-qemu" && p.Volumes[0].VolumeID == "vol-data", "got %+v", p)
		users := usersOf(t, c, "vol-data")
		check.That(t, slices.Equal(users, []string{"a", "half"}), "using: %v", users)
		half := check.Value(c.ByUID(t.Context(), "uid-half"))(t)
		check.Kind(t, unknownOf(t, half, "open"), volume.Timeout, "default/open", "cannot be reached", f.server.URL, "since 20")
	}
	f.put(aPod("new", "later"))
	check.Kind(t, check.Err(c.ByUID(t.Context(), "uid-new")), volume.Timeout, "uid-new", allPods, "since 20", "cannot be reached", f.server.URL)
	check.Kind(t, check.Err(c.Using(t.Context(), driver, "vol-later")), volume.Timeout, "vol-later", "since 20", "cannot be reached")
	n := f.count("get persistentvolumeclaimsdefault/open")
	check.That(t, n == gets, "a server that is away was asked for a claim %d times", n-gets)
	s := c.State()
	check.That(t, !s.Synced["pods"] && !s.LastHeard.Before(heard) && strings.Contains(s.Problems[0], "cannot be reached") && c.Problem() != nil,
		"state %+v", s)

	f.setAway(false)
	synced(t, c)
	eventually(t, c, "the new pod is known", func() bool { _, err := c.ByUID(t.Context(), "uid-new"); return err == nil })
	eventually(t, c, "its volume is known", func() bool {
		pods, err := c.Using(t.Context(), driver, "vol-later")
		return err == nil && len(pods) == 1 && pods[0].Name == "new"
	})
}

// TestBeingAwayIsOneEvent: not a line in the log for each try.
func TestBeingAwayIsOneEvent(t *testing.T) {
	core, logs := observer.New(zap.InfoLevel)
	c := New(Config{Log: zap.New(core)})
	for range 5 {
		c.health.failed(allPods, true, os.ErrDeadlineExceeded)
		c.health.good(allPods, false) // a list, when only the watch is refused
	}
	since := c.health.problem(allPods).Error()
	c.health.good(allPods, true)
	c.health.good(allPods, true)
	check.That(t, logs.Len() == 2 && strings.Contains(since, "since 20") && c.health.problem(allPods) == nil, "%d lines, %q", logs.Len(), since)
}

func TestIdentityThatIsNotTaken(t *testing.T) {
	for code, words := range map[int][]string{
		401: {"does not take our identity"},
		403: {"does not allow it", thisNode},
		503: {"answers"},
	} {
		f := newFakeAPI(t)
		f.setRefused("list pods", code)
		c := start(t, f, hasty)
		eventually(t, c, "the failure is seen", func() bool { return c.health.problem(allPods) != nil })
		check.Kind(t, check.Err(c.ByUID(t.Context(), "uid-a")), volume.Timeout, append(words, "since 20", allPods)...)
	}
}

func TestAKubeconfigThatComesLate(t *testing.T) {
	f := newFakeAPI(t)
	f.put(aPod("a"))
	path := filepath.Join(t.TempDir(), "kubelet.conf")
	c := startWith(t, path, patient)
	eventually(t, c, "the failure is seen", func() bool { return c.health.problem(identity) != nil })
	s := c.State()
	check.That(t, len(s.Problems) == 1 && strings.Contains(s.Problems[0], path) && strings.Contains(s.Problems[0], "does not exist"), "state %+v", s)
	f.writeKubeconfig(path)
	check.Value(c.ByUID(t.Context(), "uid-a"))(t)
}

func TestAKubeconfigThatLeadsElsewhereNow(t *testing.T) {
	old, moved := newFakeAPI(t), newFakeAPI(t)
	old.putBound("data")
	old.put(aPod("a", "data"))
	moved.put(aPod("a", "data"), aPod("b"))
	path := old.kubeconfig()
	c := startWith(t, path, patient)
	check.Value(c.ByUID(t.Context(), "uid-a"))(t)
	old.setAway(true)
	moved.writeKubeconfig(path)
	check.Value(c.ByUID(t.Context(), "uid-b"))(t)
	// What was learned before holds.
	got := check.Value(c.ByUID(t.Context(), "uid-a"))(t)
	check.That(t, got.Volumes[0].VolumeID == "vol-data", "got %+v", got)
	synced(t, c)
}

func TestAKubeconfigThatOthersCanWriteIsNotUsed(t *testing.T) {
	f := newFakeAPI(t)
	path := f.kubeconfig()
	check.Must(t, os.Chmod(path, 0o666))
	check.Fails(t, check.Err(apiserver.Identity{Kubeconfig: path}.Config()), "chmod go-w "+path)
	garbage := filepath.Join(t.TempDir(), "garbage")
	check.Must(t, os.WriteFile(garbage, []byte("{"), 0o600))
	for _, bad := range []string{t.TempDir(), filepath.Join(t.TempDir(), "none"), garbage} {
		check.Fails(t, check.Err(apiserver.Identity{Kubeconfig: bad}.Config()), bad)
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	check.Fails(t, check.Err(apiserver.Identity{InCluster: true}.Config()), "service account") // without a pod of its own
}

func TestVolumesOfManyPodsAreLearnedAhead(t *testing.T) {
	f := newFakeAPI(t)
	claims := numbered("c", 120)
	f.putBound(claims...)
	for i, pod := range numbered("p", 60) {
		f.put(aPod(pod, claims[2*i], claims[2*i+1]))
	}
	ended := aPod("ended", "gone")
	ended.Status.Phase = corev1.PodFailed
	f.put(ended)
	c := start(t, f, hasty)
	eventually(t, c, "all are learned", func() bool { s := c.State(); return s.Pods == 61 && s.Incomplete == 0 })
	f.setAway(true)
	for i, pod := range numbered("p", 60) {
		users := usersOf(t, c, "vol-"+claims[2*i+1])
		check.That(t, slices.Equal(users, []string{pod}), "using: %v", users)
	}
	n := f.count("get persistentvolumeclaimsdefault/gone")
	check.That(t, n == 0, "the claim of a pod that has ended was asked for %d times", n)
}
