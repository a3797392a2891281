//go:build system

package deploy

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
)

// strictlyTyped reads every object as the type that Kubernetes has of it: a key that
// is misspelt or in the wrong place is an error. Types of the Prometheus Operator are
// not Kubernetes'.
func strictlyTyped(t *testing.T, all []*unstructured.Unstructured) {
	t.Helper()
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	known := 0
	for _, one := range all {
		if strings.HasPrefix(one.GetAPIVersion(), "monitoring.coreos.com/") {
			continue
		}
		raw, err := one.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := decoder.Decode(raw, nil, nil); err != nil {
			t.Errorf("%s %s: %v", one.GetKind(), one.GetName(), err)
		}
		known++
	}
	if known == 0 {
		t.Error("nothing was rendered")
	}
}
