//go:build system

package deploy

import (
	"os"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/deploy/render"
)

// TestExamples: the rule in examples/kubernetes selects each pod's runtime class, and
// Kata's classes are among those that kata-deploy makes.
func TestExamples(t *testing.T) {
	const dir = "../../examples/kubernetes/"
	text := check.Value(os.ReadFile(dir + "config.yaml"))(t)
	cfg := check.Value(config.Parse(text))(t)
	chosen := cfg.Policy.Rules[0].RuntimeHandlers
	for file, class := range map[string]string{"kata.yaml": "kata-qemu", "crust.yaml": "crust"} {
		all := render.Objects(t, string(check.Value(os.ReadFile(dir+file))(t)))
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
