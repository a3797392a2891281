//go:build system

package kube_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestExplainedAsItIs has three pods explained: before they exist, from a file, and then by the daemon. Each comes to be as explained.
func TestExplainedAsItIs(t *testing.T) {
	k := cluster.On(t)
	k.Settings(cluster.ProxySettings{
		Rules: `[{name: sub-paths stay, runtimeHandlers: [crust], namespaces: [` + cluster.Namespace + `], needs: [subPath], defer: false}, ` +
			`{name: asked, runtimeHandlers: [other], annotated: true, defer: true}, {name: all, runtimeHandlers: [crust], defer: true, thenOnHost: allow}]`,
		Cluster: k.DefaultProxy().Cluster,
	})
	inEachWay(k, t, "explained", func(k *cluster.Kube, way, driver string) {
		v := k.NewVolume(cluster.VolumeOptions{Name: "explained-" + way, Driver: driver})
		deferred := k.NewPod("deferred-"+way, cluster.Crust).With(v, "/data")
		wantExplained(k, deferred, driver, "deferred to the handler crust", `not rule "sub-paths stay": needs: it has none, and the rule wants subPath`, `by rule "all"`)
		deferred.Start()
		wantDeferred(k, deferred, v, "all")
		askExplained(k, deferred, "deferred to the handler crust", `by rule "all"`)
		deferred.Delete()
		host := k.NewPod("host-"+way, cluster.Crust).With(v, "/data", subPath("dir"))
		wantExplained(k, host, driver, "on the host", `by rule "sub-paths stay"`)
		host.Start()
		wantOnHost(k, host, v)
		askExplained(k, host, "on the host", `by rule "sub-paths stay"`)
		var events struct{ Events []struct{ Text string } }
		k.Must(ask(k, &events, "events", host.Namespace+"/"+host.Name))
		n := len(events.Events)
		check.That(k.T, n != 0 && events.Events[n-1].Text == `not deferred, by rule "sub-paths stay"`, "the history has %+v", events)
		host.Delete()
		refused := asks(k.NewPod("refused-"+way, cluster.Runc).With(v, "/data"), v.Name)
		const why = "no rule of this node's policy that says annotated: true matches the driver"
		wantExplained(k, refused, driver, "refused", "by no rule", why)
		refused.Create()
		wantRefused(k, refused, why)
		askExplained(k, refused, "refused", why)
		refused.Delete()
	})
}

// wantExplained explains a pod and a claim as if neither existed.
func wantExplained(k *cluster.Kube, p *cluster.Pod, driver string, words ...string) {
	k.T.Helper()
	pod, err := json.Marshal(p.Pod)
	k.Must(err)
	file, text := k.T.TempDir()+"/pod.yaml", fmt.Sprintf(`
{"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "crust"}, "handler": "crust"}
---
{"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "fast"}, "provisioner": %q}
---
{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": %q}, "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "fast"}}
---
{"apiVersion": "v1", "kind": "Pod", %s
`, driver, p.Spec.Volumes[0].PersistentVolumeClaim.ClaimName, pod[1:])
	k.Must(os.WriteFile(file, []byte(text), 0o600))
	said, err := exec.Command(rig.Program(k.T, "crust-proxy"), "validate", "--config", k.ProxyConfig(), "--pod", file).CombinedOutput() //nolint:gosec // our own
	k.Must(err)
	for _, word := range words {
		check.That(k.T, strings.Contains(string(said), word), "%q is not in\n%s", word, said)
	}
}

// askExplained has the daemon explain a pod.
func askExplained(k *cluster.Kube, p *cluster.Pod, outcome, because string) {
	k.T.Helper()
	var all struct {
		Volumes []struct {
			Outcome string
			Because []string
		}
	}
	k.Must(ask(k, &all, "explain", p.Namespace+"/"+p.Name))
	if len(all.Volumes) != 1 || all.Volumes[0].Outcome != outcome || !strings.Contains(strings.Join(all.Volumes[0].Because, "\n"), because) {
		k.T.Errorf("explained as %+v, want %s %s", all, outcome, because)
	}
}
