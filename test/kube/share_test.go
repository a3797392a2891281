//go:build system

package kube_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// TestPodsThatShareAVolume has a second pod come while another has the volume: it
// waits, with an event that says for what, and starts by itself.
func TestPodsThatShareAVolume(t *testing.T) {
	k := cluster.Beside(t)
	for name, c := range map[string]struct {
		first, second string
		says          []string
	}{
		"two in crust": {
			cluster.Crust, cluster.Crust,
			[]string{"of pod default/second-", "one sandbox can have it read-write", "wait until the other pod is gone"},
		},
		"crust, then runc": {
			cluster.Crust, cluster.Runc,
			[]string{"of pod default/second-", "mounted on the host", "deferred"},
		},
		"runc, then crust": {
			cluster.Runc, cluster.Crust,
			[]string{"of pod default/second-", "mounted on the host", "deferred"},
		},
	} {
		inEachWay(k, t, name, func(k *cluster.Kube, way, driver string) {
			id := strings.NewReplacer(" ", "-", ",", "").Replace(name) + "-" + way
			v := k.NewVolume(cluster.VolumeOptions{Name: id, Driver: driver})
			first := k.NewPod("first-"+id, c.first).With(v, "/data").Start()
			first.Exec("echo first > /data/file && sync")
			second := k.NewPod("second-"+id, c.second).With(v, "/data")
			second.Spec.NodeName = cluster.NodeName // the scheduler would refuse it before kubelet does
			second.Create()
			said := second.WaitEvent("FailedMount", c.says...)
			check.That(k.T, c.first != cluster.Crust || strings.Contains(said, "for the pod default/"+first.Name+":"),
				"it does not name the other pod: %s", said)
			wantRefusedBy(k, second, c.second)
			first.Exec("cat /data/file && touch /data/still && sync")
			first.Delete()
			second.WaitReady()
			wantForgotten(k, second)
			wantOut(k, second, "main", "cat /data/file && ls /data/still", "first\n/data/still\n")
			if c.second == cluster.Crust {
				wantGuarded(k, second, v)
			} else {
				wantOnHost(k, second, v)
			}
			second.Delete()
		})
	}
	inEachWay(k, t, "the same name", sameName)
}

// wantRefusedBy wants crustctl to show who said no to a second pod, and what was decided for it.
func wantRefusedBy(k *cluster.Kube, p *cluster.Pod, class string) {
	k.T.Helper()
	is, err := refusalOf(k, p)
	k.Must(err)
	want := map[string]string{cluster.Crust: fmt.Sprintf("rule %q", inCrust), cluster.Runc: "no rule"}
	check.That(k.T, is.RefusedBy == "volume" && is.Handler == class && is.Rule == want[class], "crustctl shows %+v", is)
}

// sameName takes a pod away by force and makes it anew, as people do with the pods
// of a StatefulSet: the node still has the old one when the new one comes.
func sameName(k *cluster.Kube, way, driver string) {
	v := k.NewVolume(cluster.VolumeOptions{Name: "set-" + way, Driver: driver})
	old := k.NewPod("set-"+way, cluster.Crust).With(v, "/data")
	old.Script("trap 'echo ended > /data/ended; exit 0' TERM; while :; do sleep 3600 & wait $!; done")
	old.Start()
	ask := int64(0)
	k.Must(k.Client.CoreV1().Pods(cluster.Namespace).Delete(k.T.Context(), old.Name, metav1.DeleteOptions{GracePeriodSeconds: &ask}))
	k.Eventually("the API server forgets pod "+old.Name, func(ctx context.Context) error {
		if is, err := old.Get(ctx); err == nil {
			return fmt.Errorf("it is %s", is.Status.Phase)
		}
		return nil
	})
	anew := k.NewPod("set-"+way, cluster.Crust).With(v, "/data").Start()
	check.That(k.T, anew.UID != old.UID, "it is the same pod")
	wantGuarded(k, anew, v)
	// The old one wrote to its end, and the new one finds that.
	wantOut(k, anew, "main", "cat /data/ended && touch /data/new", "ended\n")
	anew.Delete()
}
