//go:build system

package kube_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// whoAsks is a rule by which pods ask for themselves.
const whoAsks = `[{name: who asks, runtimeHandlers: [crust], annotated: true, defer: true, thenOnHost: allow}]`

// asks has a pod ask for volumes of its own.
func asks(p *cluster.Pod, what string) *cluster.Pod {
	p.Annotations = map[string]string{policy.AnnotationKey: what}
	return p
}

// TestPodsThatAsk is about the annotation, and about pods that are refused: what
// people see, and what happens when they put it right.
func TestPodsThatAsk(t *testing.T) {
	k := cluster.On(t)
	k.Settings(cluster.ProxySettings{Rules: whoAsks, Cluster: strings.Replace(k.DefaultProxy().Cluster, "{", "{events: true, ", 1)})
	inEachWay(k, t, "by name", askByName)
	inEachWay(k, t, "wrong name", askForNothing)
}

// askByName has one volume of a pod deferred, and the other one not.
func askByName(k *cluster.Kube, way, driver string) {
	asked := k.NewVolume(cluster.VolumeOptions{Name: "asked-" + way, Driver: driver})
	other := k.NewVolume(cluster.VolumeOptions{Name: "other-" + way, Driver: driver})
	p := asks(k.NewPod("asks-"+way, cluster.Crust).With(asked, "/data").With(other, "/other"), asked.Name).Start()
	wantDeferred(k, p, asked, "who asks")
	for _, name := range []string{p.Namespace + "/" + p.Name, p.Namespace + "/" + asked.Name} { // the pod, and the claim
		is, err := crustctl(k, name)
		check.That(k.T, err == nil && is.TargetPath == p.Target(asked), "crustctl finds by the name %s: %+v, %v", name, is, err)
	}
	wantGuarded(k, p, asked)
	wantOnHost(k, p, other)
	var all struct {
		Volumes []struct{ Volume, Outcome string }
	}
	k.Must(ask(k, &all, "explain", p.Namespace+"/"+p.Name))
	want := fmt.Sprintf("[{%s deferred to the handler crust} {%s on the host}]", asked.Name, other.Name)
	check.That(k.T, fmt.Sprint(all.Volumes) == want, "explained as %+v, want %s", all, want)
	p.Exec("echo one > /data/file && echo other > /other/file && sync")
	p.Delete()
	// Another pod, which asks for nothing, has both on the host.
	silent := k.NewPod("silent-"+way, cluster.Crust).With(asked, "/data").With(other, "/other").Start()
	wantOnHost(k, silent, asked)
	wantOut(k, silent, "main", "cat /data/file /other/file", "one\nother\n")
	silent.Delete()
}

// askForNothing has a pod name a volume that it has none of. Its annotation is put right, and it starts.
func askForNothing(k *cluster.Kube, way, driver string) {
	v := k.NewVolume(cluster.VolumeOptions{Name: "misspelt-" + way, Driver: driver})
	p := asks(k.NewPod("misspelt-"+way, cluster.Crust).With(v, "/data"), "mispelt").Create()
	is := wantRefused(k, p, `"mispelt"`, "the pod has no volume of that name", "correct the annotation")
	check.That(k.T, is.RefusedBy == "pod", "crustctl shows %+v", is)
	k.T.Log(p.WaitEvent("VolumeRefused", "(pod)", "the pod has no volume of that name")) // crust-proxy's own
	annotate(k, p, v.Name)
	p.WaitReady()
	wantDeferred(k, p, v, "who asks")
	wantForgotten(k, p)
	p.Delete()
}

// wantRefused waits until a pod's events say why it does not start, in one
// sentence that kubectl describe shows, and gives what crustctl shows.
func wantRefused(k *cluster.Kube, p *cluster.Pod, words ...string) shown {
	k.T.Helper()
	said := p.WaitEvent("FailedMount", words...)
	k.T.Log(said)
	_, sentence, _ := strings.Cut(said, " desc = ")
	check.That(k.T, strings.Count(sentence, "of pod "+cluster.Namespace+"/"+p.Name+": ") == 1 && strings.Count(sentence, "volume /") == 1 &&
		!strings.ContainsAny(sentence, "\n\t") && len(sentence) <= 700, "it is not one sentence: %q", sentence)
	check.That(k.T, strings.Contains(p.Describe(), sentence), "kubectl describe does not show it:\n%s", p.Describe())
	is, err := refusalOf(k, p)
	k.Must(err)
	check.That(k.T, is.LastError == sentence && is.State == "VOLUME_STATE_REFUSED", "crustctl shows %+v", is)
	return is
}

func refusalOf(k *cluster.Kube, p *cluster.Pod) (shown, error) {
	k.T.Helper()
	all, err := listed(k, "--state", "refused")
	for _, one := range all {
		if one.PodName == p.Name {
			return crustctl(k, one.TargetPath)
		}
	}
	return shown{}, errors.Join(err, fmt.Errorf("crustctl lists no refusal of pod %s: %+v", p.Name, all))
}

// wantForgotten wants that nothing of a pod is refused any more.
func wantForgotten(k *cluster.Kube, p *cluster.Pod) {
	k.T.Helper()
	is, err := refusalOf(k, p)
	check.That(k.T, err != nil, "crustctl still shows %+v", is)
}

// annotate changes what a pod asks for, while it waits.
func annotate(k *cluster.Kube, p *cluster.Pod, what string) {
	k.T.Helper()
	k.Eventually("the annotation of pod "+p.Name+" is changed", func(ctx context.Context) error {
		is, err := p.Get(ctx)
		if err != nil {
			return err
		}
		delete(is.Annotations, policy.AnnotationKey)
		if what != "" {
			metav1.SetMetaDataAnnotation(&is.ObjectMeta, policy.AnnotationKey, what)
		}
		_, err = k.Client.CoreV1().Pods(cluster.Namespace).Update(ctx, is, metav1.UpdateOptions{})
		return err
	})
}
