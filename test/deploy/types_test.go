//go:build system

package deploy

import (
	"os"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/deploy/render"
)

// foreign are the groups of types that Kubernetes does not have by itself.
var foreign = []string{"monitoring.coreos.com", "cert-manager.io", "cbt.storage.k8s.io", "snapshot.storage.k8s.io"}

// strictlyTyped reads every object as the type that Kubernetes has of it: a key that
// is misspelt or in the wrong place is an error. What other projects define is not
// known to it.
func strictlyTyped(t *testing.T, all []*unstructured.Unstructured) {
	t.Helper()
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	known := 0
	for _, one := range all {
		if !scheme.Scheme.IsGroupRegistered(one.GroupVersionKind().Group) {
			check.That(t, slices.Contains(foreign, one.GroupVersionKind().Group),
				"%s %s: nobody knows the group %q", one.GetKind(), one.GetName(), one.GroupVersionKind().Group)
			continue
		}
		_, _, err := decoder.Decode(check.Value(one.MarshalJSON())(t), nil, nil)
		check.That(t, err == nil, "%s %s: %v", one.GetKind(), one.GetName(), err)
		known++
	}
	check.That(t, known != 0, "nothing was rendered")
}

// TestExamples: what examples/kubernetes has is typed, its rule selects each pod's runtime class, and
// Kata's classes are among those that kata-deploy makes.
func TestExamples(t *testing.T) {
	const dir = "../../examples/kubernetes/"
	text := check.Value(os.ReadFile(dir + "config.yaml"))(t)
	cfg := check.Value(config.Parse(text))(t)
	chosen := cfg.Policy.Rules[0].RuntimeHandlers
	for file, class := range map[string]string{"kata.yaml": "kata-qemu", "crust.yaml": "crust"} {
		all := render.Objects(t, string(check.Value(os.ReadFile(dir+file))(t)))
		strictlyTyped(t, all)
		for _, one := range all {
			got, found, _ := unstructured.NestedString(one.Object, "spec", "runtimeClassName")
			check.That(t, !found || got == class && slices.Contains(chosen, got),
				"%s: the pod's class is %q, and the rule's are %q", file, got, chosen)
		}
	}
	verdicts := cfg.DeferralPolicy()
	for _, class := range chosen {
		verdict, err := verdicts.Decide(policy.Input{Driver: "disk.csi.example.com", RuntimeHandler: class, PodKnown: true})
		check.That(t, err == nil && verdict.Handler != "", "%s: %+v, %v", class, verdict, err)
	}
}
