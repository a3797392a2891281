package pods

import (
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestWhatIsTried(t *testing.T) {
	f := newFakeAPI(t)
	f.put(aPod("a"), class("kata", "kata"))
	who := apiserver.Identity{Kubeconfig: f.kubeconfig()}
	failed := func() []string {
		var out []string
		for _, one := range apiserver.Try(t.Context(), who, thisNode) {
			if one.Err != nil {
				out = append(out, one.What+": "+one.Err.Error())
			}
		}
		return out
	}
	want := func(n int, words ...string) {
		t.Helper()
		got := failed()
		check.Says(t, "it", strings.Join(got, "\n"), words...)
		check.That(t, len(got) == n, "%d failed, want %d: %q", len(got), n, got)
	}
	want(1, "there is a node "+thisNode)
	f.put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: thisNode}})
	want(0)
	f.setRefused("get nodes", 403)
	want(0)
	f.setRefused("list pods", 403)
	f.setRefused("list csidrivers", 401)
	f.setRefused("get csinodes", 403)
	want(3, "the CSINode of node "+thisNode+" can be read", "the pods of node "+thisNode+" can be listed", "does not allow", "CSI drivers", "does not take our identity")
	f.setRefused("watch runtimeclasses", 403)
	f.setRefused("get persistentvolumeclaims", 403)
	f.setRefused("get persistentvolumes", 403)
	want(6, "claims can be read", "persistent volumes can be read", "runtime classes can be watched")
	f.setAway(true)
	want(1, "cannot be reached", f.server.URL)
	who.Kubeconfig = "/does/not/exist"
	want(1, "/does/not/exist", "can be read")
}

func TestNodeNameIsAsKubeletHasIt(t *testing.T) {
	name, err := apiserver.NodeName()
	check.That(t, err == nil && name != "" && name == strings.ToLower(strings.TrimSpace(name)), "got %q, %v", name, err)
}

func TestQuestionsAreTimed(t *testing.T) {
	f := newFakeAPI(t)
	f.put(aPod("a"))
	asked := make(chan string, 2)
	c := New(Config{Identity: apiserver.Identity{Kubeconfig: f.kubeconfig()}, NodeName: thisNode, Patience: hasty,
		Asked: func(question string, took time.Duration, err error) {
			if took <= 0 {
				err = errors.Join(err, errors.New("no time taken"))
			}
			asked <- question + " " + map[bool]string{true: "ok", false: "failed"}[err == nil]
		}})
	_, _ = c.ByUID(t.Context(), "uid-a")
	_, _ = c.Using(t.Context(), driver, "vol-a")
	a, b := <-asked, <-asked
	check.That(t, a == "pod failed" && b == "volume failed", "got %q, %q", a, b)
}
