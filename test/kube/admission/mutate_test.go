//go:build system

package admission

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestAnnotatedByClass: the policy names a pod's claims where nobody has said
// anything, and what comes out passes the validating ones.
func TestAnnotatedByClass(t *testing.T) {
	r := start(t)
	r.install(t, "--set=admission.mutate.enabled=true")
	r.inForce(t)
	const none = "none"
	asks := func(p *corev1.Pod) string {
		if value, said := p.Annotations[policy.AnnotationKey]; said {
			return value
		}
		return none
	}
	await(t, "the mutating policy", func() bool {
		made, err := r.dry(t, pod("kata", claim("data")))
		return err == nil && asks(made) == "data"
	})
	for what, is := range map[string]struct {
		pod  *corev1.Pod
		want string
	}{
		"one claim":                {pod("kata", claim("data")), "data"},
		"claims and others":        {pod("kata", claim("a"), scratch("tmp"), ephemeral("b"), inline("cert", "csi.cert-manager.io", "")), "a,b"},
		"raw block is left out":    {pod("kata", claim("a"), device("b")), "a"},
		"only raw block":           {pod("kata", device("b")), none},
		"no claim":                 {pod("kata", scratch("tmp")), none},
		"no volumes":               {pod("kata"), none},
		"another class":            {pod("crust", claim("data")), none},
		"no class":                 {pod("", claim("data")), none},
		"said by hand":             {pod("kata", annotated("a"), claim("a"), claim("b")), "a"},
		"all, by hand":             {pod("kata", annotated("*"), claim("a"), claim("b")), "*"},
		"nothing, by hand":         {pod("kata", annotated(""), claim("a")), ""},
		"nothing, and its subPath": {pod("kata", annotated(""), claim("a", subPath)), ""},
	} {
		made, err := r.dry(t, is.pod)
		if err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		got := asks(made)
		check.That(t, got == is.want, "%s: it asks for %q, want %q", what, got, is.want)
	}
	other := pod("kata", claim("data"))
	other.Annotations = map[string]string{"example.com/other": "word"}
	made, err := r.dry(t, other)
	check.That(t, err == nil && made.Annotations["example.com/other"] == "word" && asks(made) == "data",
		"other annotations: %v, %v", made.Annotations, err)
	// What it says is looked at like what a person says.
	_, err = r.dry(t, pod("kata", claim("data", subPath)))
	err = says(err, "pods", "the volume data is to be deferred")
	check.That(t, err == nil, "%v", err)
	// So is what it will say of a workload's pods.
	check.Must(t, says(r.makes(t, deployment(2, pod("kata", claim("data")), "Recreate")), "workloads", "has 2 pods"))
	check.NoError(t, r.makes(t, deployment(2, pod("kata", annotated(""), claim("data")), "Recreate")), "two pods that ask for nothing")
	onlySome(t, r)
}

// onlySome: the policies hold where the selector says, and nowhere else.
func onlySome(t *testing.T, r *rig) {
	t.Helper()
	for name, labels := range map[string]map[string]string{"inside": {"volumes": "deferred"}, "outside": nil} {
		space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
		check.Must(t, check.Err(r.client.CoreV1().Namespaces().Create(t.Context(), space, metav1.CreateOptions{})))
	}
	r.install(t, "--set=admission.mutate.enabled=true", "--set=admission.namespaceSelector.matchLabels.volumes=deferred")
	in := func(space string) (map[string]string, error) {
		made, err := r.client.CoreV1().Pods(space).Create(t.Context(), pod("kata", claim("data")), keepNone)
		return made.Annotations, err
	}
	bad := pod("kata", annotated("!"), claim("data"))
	await(t, "the mutating policy's selector", func() bool { got, err := in("outside"); return err == nil && len(got) == 0 })
	await(t, "the validating policy's selector", func() bool {
		_, err := r.client.CoreV1().Pods("outside").Create(t.Context(), bad, keepNone)
		return err == nil
	})
	got, err := in("inside")
	check.That(t, err == nil && got[policy.AnnotationKey] == "data", "inside: %v, %v", got, err)
	_, err = r.client.CoreV1().Pods("inside").Create(t.Context(), bad, keepNone)
	err = says(err, "pods", "cannot be read")
	check.That(t, err == nil, "%v", err)
}
