//go:build system

package deploy

import (
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/crust-proxy/crust-proxy/test/check"
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
			if !slices.Contains(foreign, one.GroupVersionKind().Group) {
				t.Errorf("%s %s: nobody knows the group %q", one.GetKind(), one.GetName(), one.GroupVersionKind().Group)
			}
			continue
		}
		raw, err := one.MarshalJSON()
		check.Must(t, err)
		if _, _, err := decoder.Decode(raw, nil, nil); err != nil {
			t.Errorf("%s %s: %v", one.GetKind(), one.GetName(), err)
		}
		known++
	}
	if known == 0 {
		t.Error("nothing was rendered")
	}
}
