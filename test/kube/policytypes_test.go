//go:build system

package kube_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/deploy/render"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// TestPoliciesAreOfTheRightTypes has Kubernetes check the policies' expressions against
// the types that they are for: a field that does not exist is told then, and not by a
// pod that is refused for it. Without their bindings the policies do nothing.
func TestPoliciesAreOfTheRightTypes(t *testing.T) {
	k := cluster.Beside(t)
	policies := k.Client.AdmissionregistrationV1().ValidatingAdmissionPolicies()
	var names []string
	for _, one := range render.Objects(t, render.Kustomize(t, filepath.Join(render.Kustomizations(t), "admission"))) {
		if one.GetKind() != "ValidatingAdmissionPolicy" {
			continue
		}
		raw, err := one.MarshalJSON()
		k.Must(err)
		k.Must(k.Apply(string(raw)))
		names = append(names, one.GetName())
		t.Cleanup(func() {
			check.NoError(t, policies.Delete(context.Background(), one.GetName(), metav1.DeleteOptions{}), "clean up")
		})
	}
	check.Require(t, len(names) > 0, "there are no policies")
	for _, name := range names {
		k.Eventually("the types of "+name+" are checked", func(ctx context.Context) error {
			policy, err := policies.Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if policy.Status.TypeChecking == nil || policy.Status.ObservedGeneration != policy.Generation {
				return errors.New("not yet")
			}
			var found []string
			for _, warning := range policy.Status.TypeChecking.ExpressionWarnings {
				found = append(found, warning.FieldRef+": "+warning.Warning)
			}
			check.Empty(t, found, "%s", name)
			return nil
		})
	}
}
