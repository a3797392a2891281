package config

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// TestSampleRulesAreGood reads the example that the sample file shows as a comment.
func TestSampleRulesAreGood(t *testing.T) {
	raw, err := os.ReadFile("../../../systemd/config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	example := "policy:\n"
	for line := range strings.SplitSeq(string(raw), "\n") {
		if text, ok := strings.CutPrefix(line, "  #   "); ok {
			example += "  " + text + "\n"
		}
	}
	got, err := load(t, example)
	if err != nil {
		t.Fatalf("%v in\n%s", err, example)
	}
	if len(got.Policy.Rules) != 4 {
		t.Errorf("got %d rules from\n%s", len(got.Policy.Rules), example)
	}
}

func TestPolicyForTheCore(t *testing.T) {
	got, err := load(t, `
policy:
  format: never
  rules:
    - {name: a, drivers: [d], filesystems: [xfs], runtimeHandlers: [kata], accessModes: [SINGLE_NODE_WRITER], defer: true, handler: kata, format: guest, mkfsOptions: ["-i", "size=1024"], rootMode: "2777", grow: false}
    - {name: asked, annotated: true, runtimeHandlers: [crust, kata-clh], defer: true}
    - {name: b, defer: false}
`)
	if err != nil {
		t.Fatal(err)
	}
	want := &policy.Policy{Format: volume.FormatNever, Rules: []policy.Rule{
		{Name: "a", Drivers: []string{"d"}, Filesystems: []string{"xfs"}, RuntimeHandlers: []string{"kata"},
			AccessModes: []string{"SINGLE_NODE_WRITER"}, Defer: true, Handler: "kata", Format: volume.FormatGuest,
			MkfsOptions: []string{"-i", "size=1024"}, RootMode: "2777", Grow: new(false)},
		{Name: "asked", Annotated: true, RuntimeHandlers: []string{"crust", "kata-clh"}, Defer: true},
		{Name: "b"},
	}, Runtimes: got.DeferralPolicy().Runtimes}
	if diff := cmp.Diff(want, got.DeferralPolicy()); diff != "" {
		t.Error(diff)
	}
	text, err := got.YAML()
	if err != nil {
		t.Fatal(err)
	}
	back, err := Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(got, back); diff != "" {
		t.Error(diff)
	}
}

func TestKubeletRootMovesTheFront(t *testing.T) {
	got, err := load(t, "kubeletRoot: /k\n")
	if err != nil {
		t.Fatal(err)
	}
	f := got.Front
	if f.Registry != "/k/crust-proxy/registry" || f.MarksDir != "/k/crust-proxy/marks" || f.KubeletRegistry != "/k/plugins_registry" ||
		f.PrivateDir != "/k/plugins/kubernetes.io/csi/volumeDevices" {
		t.Errorf("got %+v", f)
	}
}

func TestRulesForPodsThatAskNeedACluster(t *testing.T) {
	const rules = "policy: {rules: [{name: asked, annotated: true, runtimeHandlers: [kata], defer: true}]}\n"
	for text, ok := range map[string]bool{
		"":                         true, // the front is off, and the rules mean nothing
		"front: {enabled: true}\n": false,
		"front: {enabled: true}\ncluster: {kubeconfig: /etc/k}\n": true,
		"front: {enabled: true}\ncluster: {inCluster: true}\n":    true,
	} {
		_, err := load(t, text+rules)
		if (err == nil) != ok || (err != nil && !strings.Contains(err.Error(), "policy.rules[0] (\"asked\").annotated")) {
			t.Errorf("%q: %v", text, err)
		}
	}
}
